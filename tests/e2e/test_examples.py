"""The example scripts, run as a user runs them, at toy size."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import sheepop

from ..command_line import Launcher

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = 300


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("notes")
    for number in range(24):
        lines = [f"Line {line} of note {number} counts {line * number} sheep.\n" for line in range(12)]
        (place / f"note{number:02d}.txt").write_text("".join(lines), encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def trained(launcher: Launcher, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run made by the first example, and what the example printed."""
    run = tmp_path_factory.mktemp("runs") / "example"
    sizes = ["--steps", "4", "--width", "16", "--vocabulary", str(VOCABULARY), "--tokens", "8"]
    return run, _run(launcher, "train_and_write.py", folder, "--output", run, *sizes, "--prompt", "Line 1")


def test_train_and_write_trains_and_writes(trained: tuple[Path, str]):
    run, printed = trained
    held_out, _, text = printed.partition("\n")
    assert re.fullmatch(r"Held out: loss \d\.\d{4}, perplexity .*, \d\.\d{4} bits per byte", held_out)
    assert text.startswith("Line 1")
    assert (run / "checkpoints" / "step-00000004").is_dir()
    again = sheepop.load(run, device="cpu").generate("Line 1", max_new_tokens=8, seed=1)
    assert text == f"Line 1{again.text}\n"


def test_next_token_shows_the_probabilities_of_the_model(launcher: Launcher, trained: tuple[Path, str]):
    printed = _run(launcher, "next_token.py", trained[0], "Line 1 of", "--count", "3")
    rows = re.findall(r"^ *([\d.]+)%  (#*) *  (\d+)  (.*)$", printed, flags=re.MULTILINE)
    lm = sheepop.load(trained[0], device="cpu")
    with torch.inference_mode():
        logits = lm.model(torch.tensor([lm.tokenizer.encode("Line 1 of")]))[0, -1].double()
    likeliest = logits.softmax(-1).sort(descending=True)
    assert [int(token_id) for _, _, token_id, _ in rows] == likeliest.indices[:3].tolist()
    assert [float(share) for share, *_ in rows] == pytest.approx((likeliest.values[:3] * 100).tolist(), abs=0.006)
    assert [ast.literal_eval(token) for *_, token in rows] == [
        lm.tokenizer.decode([token_id], skip_special=False) for token_id in likeliest.indices[:3].tolist()
    ]


def test_compare_tokenizers_counts_bytes_per_token(launcher: Launcher, folder: Path):
    printed = _run(launcher, "compare_tokenizers.py", folder / "note03.txt", "--sizes", "270", "280")
    rows = [line.split() for line in printed.splitlines()[1:]]
    text = (folder / "note03.txt").read_text(encoding="utf-8")
    measured = len(text) - len(text) * 9 // 10
    # The text is ASCII, so a character is a token and a byte.
    assert rows[0] == ["char", "128", str(measured), "1.000"]
    assert [row[:2] for row in rows[1:]] == [["bpe", "270"], ["bpe", "280"]]
    for _, _, num_tokens, bytes_per_token in rows:
        assert float(bytes_per_token) == pytest.approx(measured / int(num_tokens), abs=0.0006)
    assert int(rows[2][2]) < int(rows[1][2]) < measured


def test_hello_world_writes_the_numbers_of_the_model(
    launcher: Launcher, trained: tuple[Path, str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    _run(launcher, "hello_world.py", trained[0], "--prompt", "Line 1", "--output", page, "--device", "cpu")
    trace = sheepop.load(trained[0], device="cpu").trace("Line 1")
    sections = _check_page(page)
    rows = [row.split(" | ") for row in sections["Text to tokens"].splitlines() if row.startswith("| ")][2:]
    assert [int(row[1]) for row in rows] == trace.token_ids
    weights = sections["Attention in block 0"].split("sum to 1:")[1].strip().splitlines()[2:]
    found = [[float(cell) for cell in row.strip("| ").split(" | ")[1:]] for row in weights]
    assert found == [pytest.approx(row, abs=6e-5) for row in trace["blocks.0.attention.weights"][0].tolist()]
    (share,) = re.findall(r"is \*\*([\d.]+)%\*\*", sections["The next token"])
    assert float(share) == pytest.approx(100 * float(trace["logits"][-1].softmax(-1).max()), abs=0.006)


def test_the_page_of_the_documents_computes_what_it_says() -> None:
    _check_page(EXAMPLES.parent / "docs" / "hello-world.md")


def _check_page(page: Path) -> dict[str, str]:
    """The sections of a page by their headings, once its sums are found to be what is printed."""
    parts = re.split(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    terms, total = re.findall(r"^(.* · .*) = \*\*(.*)\*\*$", sections["One number by hand"], re.MULTILINE)[0]
    products = [[float(factor) for factor in term.split(" · ")] for term in terms.split(" + ")]
    assert sum(a * b for a, b in products) == pytest.approx(float(total), abs=1e-3)
    added = re.findall(r"^\| (.*?) \| (.*?) \|", sections["The residual stream"], re.MULTILINE)
    before, attention, forward, behind = (float(value) for name, value in added if name not in ("", "---"))
    assert before + attention + forward == pytest.approx(behind, abs=2e-4)
    *written, (name, in_all) = re.findall(
        r"^\| (.*?) \| ([+-][\d.]+) \|$", sections["The parts of a logit"], re.MULTILINE
    )
    assert name == "sum" and sum(float(value) for _, value in written) == pytest.approx(float(in_all), abs=1e-3)
    assert "**no**" not in sections["Invariants"]
    return sections


@pytest.mark.parametrize("name", ["train_and_write.py", "next_token.py", "compare_tokenizers.py"])
def test_every_example_is_short_and_says_how_to_run_it(name: str):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 50
    assert f"Example:  python examples/{name} " in text


def _run(launcher: Launcher, name: str, *arguments: object) -> str:
    program = f"import runpy; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    done = launcher.run(*arguments, program=program)
    assert done.code == 0, done.err
    return done.out
