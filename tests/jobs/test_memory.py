"""Runs whose models have a memory of the training text."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sheepop.checkpoint import RunDirectory, load_model, resolve_model_directory
from sheepop.checkpoint.memory_file import MEMORY
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.evaluate import How, run_evaluations
from sheepop.jobs.evaluation_kinds import Perplexity
from sheepop.jobs.exchange import export_model
from sheepop.jobs.generate import load_generator, score
from sheepop.jobs.task.corpus_batches import build_schedule
from sheepop.train.config import MemoryConfig
from sheepop.train.memory_documents import reserved_documents

from ..running import train, train_given

SETTINGS = (
    *("data.documents=line", "data.validation_fraction=0.1", "training.memory.longest=8", "training.max_steps=2"),
    *("model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"),
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of 300 lines, each a document of a few sentences that other lines have, too."""
    draw = np.random.default_rng(0)
    sentences = [
        "the cat sat on the mat. ",
        "a dog ran to the door. ",
        "my hat is on the chair. ",
        "we ate soup at six. ",
    ]
    place = tmp_path_factory.mktemp("lines")
    text = "\n".join(f"{number} " + "".join(draw.choice(sentences, 3)) for number in range(300))
    (place / "lines.txt").write_text(text)
    return place


@pytest.fixture(scope="module")
def run(configured: Callable[..., SheepOpConfig], lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(configured(tmp_path_factory.mktemp("memory") / "run", *SETTINGS, data=lines)).run


def test_a_run_is_scored_without_its_memory_and_with_it(run: Path) -> None:
    rows = {row["split"]: row for row in read_json_lines(run / "metrics.jsonl").rows}
    alone, together = rows["score"], rows["score_with_memory"]
    assert alone["tokens"] == together["tokens"] > 400
    assert together["bits_per_byte"] < 0.8 * alone["bits_per_byte"]
    page = (run / "report.html").read_text()
    assert f"{together['bits_per_byte']:.4f}" in page
    assert "with its memory of the training text" in page


def test_training_leaves_the_reserved_documents_out(configured: Callable[..., SheepOpConfig], run: Path) -> None:
    config, corpus = configured(run, *SETTINGS), Corpus.open(run / "corpus")
    schedule = build_schedule(config, corpus, RunDirectory(run), Console.silent(), store=False)
    read = np.zeros(corpus.train.num_tokens, dtype=bool)
    for step in range(-(-schedule.num_samples // config.training.global_batch_size)):
        for ranges in schedule.token_ranges(step):
            for start, stop in ranges:
                read[start:stop] = True
    reserved = reserved_documents(corpus.train, MemoryConfig(longest=8), config.seed)
    apart = np.zeros_like(read)
    for number in reserved:
        apart[corpus.train.offsets[number] : corpus.train.offsets[number + 1]] = True
    assert apart.any()
    assert np.array_equal(read, ~apart)


def test_a_resumed_run_makes_the_same_memory(
    configured: Callable[..., SheepOpConfig], run: Path, lines: Path, tmp_path: Path
) -> None:
    again = configured(tmp_path / "again", *SETTINGS, "training.max_steps=1", data=lines)
    train(again)
    train(again.replace(training={**again.training.model_dump(), "max_steps": 2}), resume=True)
    before, after = (resolve_model_directory(place) / MEMORY for place in (run, tmp_path / "again"))
    # An hour of training more would make another network, and so another gate.
    assert before.read_bytes() == after.read_bytes()


def test_an_evaluation_has_a_row_of_each_kind(run: Path, tmp_path: Path) -> None:
    how = How(output=tmp_path / "out", device="cpu", records=False)
    kind = Perplexity([], None, None, None, False, Console.silent())
    (result,) = run_evaluations([run], kind, how, Console.silent()).results
    alone, together = result.evaluations
    assert together.name == f"{alone.name}, with the memory of the training text"
    assert together.measure("bits_per_byte").value < 0.8 * alone.measure("bits_per_byte").value


def test_a_text_is_scored_and_written_with_the_memory(run: Path) -> None:
    alone, together = score(run, "the cat sat on the mat. a dog ran", device="cpu")
    assert together is not None
    assert together.bits_per_byte < alone.bits_per_byte
    (written,) = load_generator(run, device="cpu").generate(["the cat sat on"])
    assert written.prompt == "the cat sat on"


def test_an_export_says_that_the_memory_stays_behind(run: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    export_model(run, tmp_path / "hf", console=Console(quiet=True, file=said))
    assert "No other program reads the memory of the training text, so it is left out." in said.getvalue()
    assert not (tmp_path / "hf" / MEMORY).exists()
    assert load_model(run).memory is not None


def test_a_memory_needs_documents_of_its_own(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(
        "".join(f"This is line {number} of the only document.\n" for number in range(200))
    )
    settings = ("training.memory.longest=8", "training.max_steps=1", f"data.paths={tmp_path / 'one.txt'}", "device=cpu")
    with pytest.raises(ConfigError, match=r"A memory of the text keeps some documents for itself, but each of the 1"):
        train_given([*settings, f"output_dir={tmp_path / 'run'}"])
