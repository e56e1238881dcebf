"""A run that has minutes: what it writes down of its steps, and the run that is made from that alone."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import ConfigError, Interrupted
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.run.record import RunRecord, read_run_config, repeat_command
from sheepop.train import budget, schedule
from sheepop.train.journal import Journal
from sheepop.train.schedule import Pace

from ..running import train

PLAN = 30


@pytest.fixture
def timed(tiny: tuple[str, ...], text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SheepOpConfig:
    """A run planned as thirty steps; by its clock each takes about half as long as was planned."""
    now = iter(range(10**6))
    monkeypatch.setattr(Journal, "seconds", property(lambda journal: next(now) * 0.0004))
    for name in ("_LEAST_MEASURING_SECONDS", "_MEASURE_SHARE"):
        monkeypatch.setattr(budget, name, 0.01)
    monkeypatch.setattr(
        "sheepop.jobs.run.resolve.loop_seconds", lambda config, timing: None if config.max_minutes is None else 0.12
    )
    monkeypatch.setattr("sheepop.jobs.run.resolve.most_steps", lambda *sizes: None)
    asked = [*tiny, "training.max_minutes=5", f"training.max_steps={PLAN}", "training.log_interval=1"]
    places = {"data": {"paths": [str(text_folder)]}, "output_dir": str(tmp_path / "run"), "device": "cpu"}
    return load_config(None, asked, options=places)


def rows(run: Path, split: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timing = {"seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores"}
    return [{key: row[key] for key in row.keys() - timing} for row in found if row["split"] == split]


def last_weights(run: Path) -> dict[str, bytes]:
    newest = RunDirectory.open(run)
    file = newest.checkpoint(newest.steps()[-1]) / "model.safetensors"
    return {name: tensor.tobytes() for name, tensor in load_file(file).items()}


def test_a_run_of_minutes_is_repeated_from_its_record(timed: SheepOpConfig, tmp_path: Path) -> None:
    outcome = train(timed, command="sheepop train with minutes")
    kept = read_run_config(RunDirectory.open(outcome.run)).training
    assert kept.max_minutes is None
    assert kept.pace[0] == (0, PLAN)
    assert outcome.steps == kept.max_steps == kept.pace[-1][1] > PLAN
    assert RunRecord.read(RunDirectory.open(outcome.run)).command == "sheepop train with minutes"

    record, begin = RunRecord.read(RunDirectory.open(outcome.run)), f"sheepop train --config {outcome.run}/config.yaml"
    assert repeat_command(outcome.run, record) == f"{begin} --output {outcome.run}-again"
    forked = replace(record, forked_from={"path": "/a model", "provenance": {}})
    assert repeat_command(outcome.run, forked) == f"{begin} --fork '/a model' --output {outcome.run}-again"
    again = load_config(outcome.run / "config.yaml", [], options={"output_dir": str(tmp_path / "again")})
    repeated = train(again)
    assert RunRecord.read(RunDirectory.open(repeated.run)).deadline is None
    assert rows(repeated.run) == rows(outcome.run)
    assert rows(repeated.run, "score") == rows(outcome.run, "score")
    assert last_weights(repeated.run) == last_weights(outcome.run)


def test_a_run_that_is_given_other_steps_no_longer_looks_at_the_clock(timed: SheepOpConfig) -> None:
    outcome = train(timed)
    more = outcome.steps + 5
    longer = train(timed.replace(training={**timed.training.model_dump(), "max_steps": more}), resume=True)
    assert longer.steps == more
    kept = read_run_config(RunDirectory.open(outcome.run)).training
    assert (kept.max_steps, kept.pace) == (more, ())
    with pytest.raises(ConfigError, match=r"belongs to a run of .* but max_steps is 7"):
        load_config(None, ["training.max_steps=7", "training.pace=[[0, 30], [5, 20]]"])


def test_what_the_clock_changed_is_kept_by_a_run_that_is_stopped(
    timed: SheepOpConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    revise = schedule.Deadline.revise
    changes: list[Pace] = []

    def stopping(deadline: schedule.Deadline, *now: Any) -> Pace | None:
        found = revise(deadline, *now)
        if found is not None:
            changes.append(found)
            if len(changes) == 1:
                os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(schedule.Deadline, "revise", stopping)
    with pytest.raises(Interrupted):
        train(timed)
    run = RunDirectory.open(Path(str(timed.output_dir)))
    assert read_run_config(run).training.pace == ((0, PLAN), *changes[0].revisions)
    outcome = train(timed, resume=True)
    assert read_run_config(run).training.pace[:2] == ((0, PLAN), *changes[0].revisions)
    assert [row["step"] for row in rows(run.path)] == list(range(1, outcome.steps + 1))


@pytest.mark.parametrize(("elapsed", "share"), [(200.0, 60 / 160), (255.0, 45 / 160)])
def test_a_machine_that_became_slow_scores_less(
    timed: SheepOpConfig, monkeypatch: pytest.MonkeyPatch, elapsed: float, share: float
) -> None:
    """By its clock a quarter of the score takes 40 seconds; 60 are allowed, or what is left of five minutes."""
    plenty = rows(train(timed).run, "score")[0]["tokens"]
    now = iter([0.0, 40.0])
    monkeypatch.setattr("sheepop.jobs.run.train.time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr("sheepop.jobs.run.train._PARTS_OF_SCORE", 4)
    left = property(lambda times: elapsed if "Training" in times.seconds else 1.0)
    monkeypatch.setattr("sheepop.jobs.run.record.StageTimes.elapsed", left)
    outcome = train(timed.replace(output_dir=f"{timed.output_dir}-slow"))
    deadline = RunRecord.read(RunDirectory.open(outcome.run)).deadline
    assert deadline is not None and deadline.score_seconds == 60
    assert deadline.scored_tokens is not None
    scored = rows(outcome.run, "score")[0]["tokens"]
    assert deadline.scored_tokens == pytest.approx(share * plenty, rel=0.1)
    assert 0 < scored <= deadline.scored_tokens  # whole rows
