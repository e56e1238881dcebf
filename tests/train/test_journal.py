"""Tokens per second and the share of the peak, by hand and through the loop while rows grow longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.json_lines import read_json_lines
from sheepop.train import Trainer, journal
from sheepop.train.journal import Machine, Throughput
from sheepop.train.live_view import LEGEND
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

from .conftest import PEAK


def step_of(rows: int, length: int, *, num_tokens: int) -> PreparedStep:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    batch = TensorBatch({"input_ids": tokens}, tokens, slice(None))
    return PreparedStep([batch], num_tokens=1, num_reported=2, num_computed=num_tokens)


def test_rates_of_a_hand_worked_stretch() -> None:
    times = iter([10.0, 12.0, 16.0, 18.0, 20.0])
    per_token = {8: 1000.0, 32: 1600.0}
    throughput = Throughput(
        lambda step: step.num_computed * per_token[step.row_length], 1e6, clock=lambda: next(times)
    )  # at 10
    throughput.count(step_of(12, 8, num_tokens=96))
    with throughput.paused():  # from 12 to 16
        pass
    throughput.count(step_of(4, 32, num_tokens=128))
    # At 18, four seconds of steps: (96 + 128) / 4 tokens, (96 000 + 204 800) / 4 operations a second of a million.
    assert throughput.take() == {"tokens_per_second": 56.0, "mfu": pytest.approx(0.0752)}
    throughput.count(step_of(4, 32, num_tokens=100))
    assert throughput.take() == {
        "tokens_per_second": 50.0,
        "mfu": pytest.approx(0.08),
    }  # from 18 to 20, nothing of before


def test_time_that_an_error_ends_is_left_out_too() -> None:
    times = iter([0.0, 1.0, 4.0, 5.0])
    throughput = Throughput(lambda step: 8.0 * step.num_computed, 128.0, 256.0, clock=lambda: next(times))
    with pytest.raises(RuntimeError), throughput.paused():
        raise RuntimeError
    throughput.count(step_of(1, 8, num_tokens=8))
    assert throughput.take() == {"tokens_per_second": 4.0, "mfu": 0.25, "mfu_nominal": 0.125}


def test_steps_that_are_faster_than_the_measured_peak_raise_it() -> None:
    times = iter([0.0, 1.0, 2.0])
    throughput = Throughput(lambda step: float(step.num_computed), 4.0, clock=lambda: next(times))
    throughput.count(step_of(1, 8, num_tokens=40))
    assert throughput.take()["mfu"] == 1.0  # and not 1000 %
    throughput.count(step_of(1, 8, num_tokens=10))
    assert (throughput.take()["mfu"], throughput.peak_flops) == (0.25, 40.0)


def test_the_cores_that_were_busy_and_the_memory_in_use() -> None:
    clock, busy = iter([10.0, 14.0, 16.0]), iter([3.0, 9.0, 10.0])
    machine = Machine("cpu", clock.__next__, busy.__next__)
    found = [machine.take() for _ in range(2)]
    assert [taken["busy_cores"] for taken in found] == [1.5, 0.5]
    assert found[0]["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


@pytest.mark.parametrize("log_interval", [1, 3])
def test_the_operations_of_a_token_are_those_of_its_row_while_rows_grow(
    make_trainer: Callable[..., Trainer], log_interval: int
) -> None:
    settings: dict[str, Any] = {"sequence_length_warmup": ((2, 8), (5, 16)), "batch_size_warmup": ((4, 3),)}
    trainer = make_trainer("run", max_steps=9, log_interval=log_interval, **settings)
    trainer.run()
    rows = [r for r in read_json_lines(trainer.checkpointer.run.metrics_file)[0] if r["split"] == "train"]
    lengths = [8] * 2 + [16] * 3 + [32] * 4
    tokens = [trainer.source.schedule.batch(step).labels.size for step in range(9)]
    # A token costs as many operations here as its row has tokens, and the peak is that of the trainers.
    for row in rows:
        steps = range(row["step"] - log_interval, row["step"])
        operations = sum(tokens[step] * lengths[step] for step in steps) / sum(tokens[step] for step in steps)
        assert PEAK * row["mfu"] / row["tokens_per_second"] == pytest.approx(operations)


def test_texts_that_steps_learn_from_are_written_until_the_log_is_full(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MOST_SAMPLE_BYTES", 500)
    trainer = make_trainer("run", max_steps=9, log_interval=2)
    prepare, said = trainer.source.prepare, StringIO()
    trainer.journal._console = Console(file=said)
    row = {"prompt": "p", "text": "x" * 120, "reward": math.nan}
    trainer.source = SimpleNamespace(  # type: ignore[assignment]
        prepare=lambda number: replace(prepare(number), samples=[row] * 2), ahead=0, state=dict, restore=None
    )
    trainer.run()
    rows, _ = read_json_lines(trainer.checkpointer.run.samples_file)
    written = [row for row in rows if "reward" in row]
    assert written == [{"step": step, **row, "reward": None} for step in (2, 2, 4, 4)]
    assert said.getvalue().count("samples.jsonl is full, so answers are no longer added to it") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_terms_are_explained_once_and_no_panel_cuts_them(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    file = StringIO()
    monkeypatch.setattr(file, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    trainer = make_trainer("run", max_steps=2)
    trainer.journal._console = Console(file=file)
    trainer.run()
    assert file.getvalue().count(f"Terms: {LEGEND}\n") == 1
    assert LEGEND.startswith("loss: surprise per token; perplexity: ") and LEGEND.endswith("docs/glossary.md")
