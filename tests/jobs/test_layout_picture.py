"""What a picture of a layout says, against layouts worked out by hand; and plans, which start nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.plan import Planned
from sheepop.jobs.run.record import LAYOUT, RunRecord
from sheepop.jobs.run.report_facts import add_layout
from sheepop.jobs.run.resolve import check_layout, shared_steps
from sheepop.model import ModelConfig
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.report import Page
from sheepop.train.layout_picture import SharedStep, draw_layout, exchanges

from ..command_line import in_process

NETWORK = ModelConfig(
    vocab_size=96, d_model=32, num_layers=8, num_heads=8, d_ff=64, max_seq_len=64, tie_weights=False, dropout=0.0
)
RUN = """
model: {d_model: 32, num_layers: 4, num_heads: 4, d_ff: 64, max_seq_len: 32, position_encoding: rope, norm: rmsnorm,
  dropout: 0, short_convolution: 3, ngrams: null, activation: swiglu, bias: false}
training: {optimizer: adamw, learning_rate: 0.001, schedule: constant, global_batch_size: 16, max_steps: 4}
data: {paths: [notes/]}
"""


def step(size: int, *, rows: int = 16, micro_batch: int = 2, **settings: Any) -> SharedStep:
    return SharedStep(Layout(Ranks(0, size), ParallelConfig(**settings)), NETWORK, rows, micro_batch, num_tokens=64)


def groups(size: int, **settings: Any) -> list[list[tuple[int, ...]]]:
    found = step(size, **settings)
    return [exchange.groups(size) for exchange in exchanges(found.layout, NETWORK)]


def test_eight_ranks_of_a_pipeline_with_tensor_and_data_ranks() -> None:
    found = step(8, pipeline=2, tensor=2)
    assert found.of_rank(5).lines == [
        "layers 5–8", "head", "rows 1–8", "heads 5–8", "features 33–64", "vocabulary 49–96",
        "between layers tokens 33–64",
    ]  # fmt: skip
    assert found.of_rank(5).squares == ([(0.5, 0.5, 0.5, 0.5)], [(0, 0, 1, 0.5)])
    assert found.of_rank(2).lines[:4] == ["layers 1–4", "embedding", "rows 9–16", "heads 1–4"]
    assert groups(8, pipeline=2, tensor=2) == [
        [(0, 4), (1, 5), (2, 6), (3, 7)],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ]


def test_the_last_tensor_rank_has_the_rest_of_a_vocabulary() -> None:
    found = step(2, tensor=2)
    found = replace(found, model=NETWORK.replace(vocab_size=101))
    parts = [line for rank in range(2) for line in found.of_rank(rank).lines if line.startswith("vocabulary")]
    assert parts == ["vocabulary 1–51", "vocabulary 52–101"]


def test_two_stages_a_rank_there_and_back() -> None:
    found = step(4, pipeline=4, schedule="zero_bubble")
    assert [found.of_rank(rank).lines[0] for rank in range(4)] == [
        "layers 1 and 8", "layers 2 and 7", "layers 3 and 6", "layers 4 and 5",
    ]  # fmt: skip
    assert found.of_rank(0).lines[1] == "embedding and head"


def test_ranks_of_a_ring_that_share_experts() -> None:
    found = step(8, context=2, context_method="ring", expert=4)
    found = replace(found, model=NETWORK.replace(experts={"count": 8, "per_token": 2}))
    assert found.of_rank(6).lines == ["layers 1–8", "rows 13–16", "tokens 1–32", "experts 5–6"]
    assert [exchange.groups(8) for exchange in exchanges(found.layout, found.model)] == [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 1, 2, 3, 4, 5, 6, 7)],
    ]


def test_tokens_of_context_ranks_and_pieces_of_copies() -> None:
    found = step(8, context=2, tensor=2, micro_batch=8)
    assert found.of_rank(6).lines[1:] == [
        "rows 9–16", "tokens 33–64", "heads 1–4", "features 1–32", "vocabulary 1–48", "between layers tokens 33–48",
        "attends with heads 3–4",
    ]  # fmt: skip
    assert groups(8, zero=3, shard=4) == [[(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]]
    assert step(8, zero=3, shard=4).of_rank(6).lines == ["layers 1–8", "rows 13–14", "piece 3 of 4, copy 2"]
    assert groups(8, context=2, zero=1) == [[(0, 1), (2, 3), (4, 5), (6, 7)], [tuple(range(8))]]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"zero": 1}),
        (64, {"pipeline": 4, "tensor": 4, "zero": 1}),
        (64, {"context": 2, "tensor": 2, "zero": 3, "shard": 8}),
        (1000, {"tensor": 4, "zero": 3, "shard": 50}),
    ],
    ids=str,
)
def test_every_rank_is_in_one_group_of_each_kind_and_has_its_own_part(size: int, settings: dict[str, Any]) -> None:
    found = step(size, rows=2 * size, micro_batch=1, **settings)
    for exchange in exchanges(found.layout, NETWORK):
        assert sorted(rank for group in exchange.groups(size) for rank in group) == list(range(size))
    cells = [found.of_rank(rank) for rank in range(size)]
    assert len({(cell.name, *cell.lines) for cell in cells}) == size
    # What all ranks have of the network and of the batch together is all of both, as often as there are copies.
    layout = found.layout
    network, batch = (
        sum(wide * high for cell in cells for _, _, wide, high in cell.squares[number]) for number in (0, 1)
    )
    assert network == pytest.approx(layout.num_copies)
    assert batch == pytest.approx(layout.config.pipeline * layout.config.tensor)


@pytest.mark.parametrize(
    ("size", "settings", "shown", "words"),
    [
        (2, {}, range(2), set()),
        (64, {"zero": 3}, range(64), set()),
        (64, {"pipeline": 4, "tensor": 4}, range(64), set()),
        (1000, {"tensor": 4}, [*range(56), *range(992, 1000)], {"and 234 more data ranks alike"}),
        (12, {"pipeline": 12}, [*range(7), 11], {"and 4 more stages alike"}),
    ],
    ids=str,
)
def test_a_picture_has_a_cell_for_every_rank_or_says_how_many_are_alike(
    size: int, settings: dict[str, Any], shown: Any, words: set[str]
) -> None:
    network = NETWORK.replace(num_layers=12)
    figure = draw_layout(replace(step(size, rows=12 * size, micro_batch=1, **settings), model=network))
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    cells = [text for text in texts if text.startswith("rank ") and text != "rank"]
    named = [f"rank {rank:,}" for rank in shown]
    order = [f"rank {rank}" for rank in range(0, size, size // settings.get("pipeline", size))]
    extra = order if settings.get("pipeline") else []
    assert sorted(cells) == sorted([*named, *extra])
    assert {text for text in texts if "more" in text and "Between" not in text and "alike" in text} == words
    box = figure.bbox
    renderer = figure.canvas.get_renderer()
    for text in axes.texts:
        extent = text.get_window_extent(renderer)
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 and extent.y1 <= box.y1, text


def test_a_run_keeps_picture_and_words_for_its_page(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    planned = Planned("2 ranks: 2 data.", step(2))
    RunRecord("0.1.0", "c" * 64, "t" * 64, 93e9, 0.1, {}, {}, layout=planned.words).write(run)
    planned.draw(run.plots / LAYOUT)
    page = Page("run")
    add_layout(page, run, RunRecord.read(run))
    html = page.to_html()
    assert "<p>2 ranks: 2 data.</p>" in html
    assert '<img src="data:image/png;base64,' in html
    assert (run.plots / LAYOUT).read_bytes().startswith(b"\x89PNG")


def test_a_plan_says_what_a_run_would_be_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("A sheep. " * 40)
    more = ["train", "--config", "run.yaml", "--device", "cuda", "tokenizer.vocab_size=512"]
    done = in_process("launch", "-n", 8, "--plan", "plan/layout.png", *more, "parallel.tensor=2")
    assert done.code == 0, done.err
    assert done.out.startswith("Layout: 8 ranks: 4 data times 2 tensor; every copy whole. Each holds ")
    assert "The vocabulary is still to be trained; tokenizer.vocab_size = 512 is assumed.\n" in done.out
    assert "training.precision = bf16 is assumed.\n" in done.out  # that of the device named
    assert done.out.endswith("Picture: plan/layout.png\n")
    assert Path("plan/layout.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["notes", "plan", "run.yaml"]
    many = ("training.global_batch_size=500", "parallel.tensor=2")
    done = in_process("launch", "--machines", 125, "-n", 8, "--plan", "many.png", *more, *many)
    assert done.out.startswith("Layout: 1,000 ranks: 500 data times 2 tensor; "), done.err


def test_the_command_of_the_page_says_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "parallel.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^sheepop (launch -n 8 --plan .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    words = [str(root / word) if word.startswith("recipes/") else word for word in line.split()]
    done = in_process(*words)
    assert done.code == 0, done.err
    assert f"```text\n{done.out}```\n" in page


@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.tensor=3"],
        ["parallel.tensor=8"],
        ["parallel.pipeline=8"],
        ["training.global_batch_size=9"],
        ["parallel.zero=2", "parallel.pipeline=2"],
        ["parallel.expert=2"],
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_refused_as_a_run_refuses_it(settings: list[str], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    done = in_process("launch", "-n", 8, "--plan", tmp_path / "x.png", "train", "--config", config, *settings)
    with pytest.raises(Exception, match=r"\.") as refused:
        _as_a_run(config, settings)
    assert (done.code, done.err) == (2, f"Error: {refused.value}\n")
    assert not (tmp_path / "x.png").exists()


def _as_a_run(path: Path, settings: list[str]) -> None:
    from sheepop.jobs.config import load_config

    config: SheepOpConfig = load_config(path, [*settings, "output_dir=runs/x", "model.vocab_size=512"])
    check_layout(config, Ranks(0, 8))
    shared_steps(config, Ranks(0, 8), is_open=True)


@pytest.mark.parametrize("more", [["--print"], ["--plan", "layout.svg"]])
def test_a_plan_goes_into_a_png_and_not_with_print(more: list[str]) -> None:
    done = in_process("launch", "-n", 2, "--plan", "layout.png", *more, "train")
    assert done.code == 2
    assert "--plan needs a file name FILE.png" in done.err
