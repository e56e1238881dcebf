"""Training where something around it is missing or fails."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.core.errors import Interrupted, StorageError, TrainingError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run import report
from sheepop.jobs.run.record import RunRecord
from sheepop.train.sinks import TensorBoard

from ..running import train


def test_without_a_compiler_a_run_goes_on_and_says_so(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    config = configured(tmp_path / "run", "training.max_steps=2", "training.compile=true")
    messages = io.StringIO()
    outcome = train(config, console=Console(quiet=True, file=messages))
    assert outcome.steps == 2
    assert "needs a C++ compiler" in messages.getvalue()
    assert read_config_file(tmp_path / "run" / "config.yaml")["training"]["compile"] is False


def test_a_sink_that_throws_leaves_the_run_as_it_is(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(sink: TensorBoard, row: Mapping[str, Any]) -> None:
        raise OSError("no network")

    monkeypatch.setattr(TensorBoard, "write", write)
    every_step, messages = "training.log_interval=1", io.StringIO()
    train(configured(tmp_path / "without", every_step))
    with_sink = configured(tmp_path / "with", every_step, "training.sinks=[tensorboard]")
    train(with_sink, console=Console(quiet=True, file=messages))
    losses = [
        [(row["step"], row["split"], row["loss"]) for row in read_json_lines(tmp_path / name / "metrics.jsonl")[0]]
        for name in ("without", "with")
    ]
    assert losses[0] == losses[1]
    assert "Warning: TensorBoard failed; the run continues without it: OSError: no network\n" in messages.getvalue()
    lacking = sum(split != "score" for _, split, _ in losses[0])  # the score comes when the sinks are closed
    assert f"TensorBoard is missing {lacking} rows of this run; metrics.jsonl has all" in messages.getvalue()


def test_a_write_that_is_refused_before_the_first_checkpoint_says_so(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunDirectory.write_checkpoint

    def something_in_the_way(run: RunDirectory, step: int) -> AbstractContextManager[Path]:
        run.checkpoints.rmdir()
        run.checkpoints.touch()
        return write(run, step)

    monkeypatch.setattr(RunDirectory, "write_checkpoint", something_in_the_way)
    with pytest.raises(StorageError, match=r"^Cannot write .*\. No checkpoint of this run had been written\.$"):
        train(configured(tmp_path / "run"))


def test_an_interrupt_before_the_first_step_names_no_run_to_go_on_with(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sheepop.jobs.task.corpus.fit_model_to_tokenizer", interrupt)
    with pytest.raises(Interrupted, match=r"No step was taken .* Run the command again\.$") as caught:
        train(configured(tmp_path / "run"))
    assert caught.value.exit_code == 130
    assert not (tmp_path / "run").exists()


def test_the_report_is_written_under_the_lock(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    write, record = report.write_run_report, RunRecord.write
    monkeypatch.setattr(
        report,
        "write_run_report",
        lambda run, *rest, **more: (seen.append(run.is_running()), write(run, *rest, **more)),
    )
    monkeypatch.setattr(RunRecord, "write", lambda kept, run: (seen.append(run.is_running()), record(kept, run)))
    train(configured(tmp_path / "run"))
    assert len(seen) >= 3 and all(seen)
    assert not RunDirectory(tmp_path / "run").is_running()


def test_a_run_that_ends_in_trouble_has_its_report_and_times(
    configured: Callable[..., SheepOpConfig], tmp_path: Path
) -> None:
    rates = ("training.learning_rate=1e9", "training.max_grad_norm=1e9", "training.warmup_steps=0")
    with pytest.raises(TrainingError):
        train(configured(tmp_path / "run", *rates, "training.optimizer=sgd", "training.trouble.non_finite=stop"))
    run = RunDirectory(tmp_path / "run")
    assert "Training" in RunRecord.read(run).stage_seconds
    assert "The run stopped after step" in run.report.read_text()
