"""The range test on real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs import learning_rate
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.learning_rate import find_rate
from sheepop.jobs.run.request import RunRequest
from sheepop.parallel.ranks import Ranks

from ..running import train

Configured = Callable[..., SheepOpConfig]


def test_a_range_test_writes_its_result_and_starts_no_run(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_rate, "NUM_STEPS", 40)
    found = find_rate(RunRequest.exactly(configured(tmp_path / "out")))
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {"learning-rate.json", "learning-rate.png"}
    written = json.loads((tmp_path / "out" / "learning-rate.json").read_text())
    assert written == found.test.to_dict()
    assert written["rates"][0] == pytest.approx(1e-6)
    assert written["rates"][1] / written["rates"][0] == pytest.approx(10 ** (6 / 39))
    assert 1e-6 < written["suggestion"] <= written["lowest"] <= 1.0
    again = find_rate(RunRequest.exactly(configured(tmp_path / "again")))
    assert again.test == found.test


def test_its_first_batch_is_that_of_a_run(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_rate, "NUM_STEPS", 40)
    found = find_rate(RunRequest.exactly(configured(tmp_path / "out", "model.dropout=0")))
    train(configured(tmp_path / "run", "model.dropout=0", "training.max_steps=1", "training.log_interval=1"))
    first = read_json_lines(tmp_path / "run" / "metrics.jsonl")[0][0]
    assert (first["step"], first["loss"]) == (1, found.test.losses[0])


def test_it_computes_as_a_run_does(configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 with a scale, without which Adam's steps are made of what is left of the gradients."""
    monkeypatch.setattr(learning_rate, "NUM_STEPS", 20)
    usual = find_rate(RunRequest.exactly(configured(tmp_path / "usual", "model.dropout=0")))
    scaled = find_rate(
        RunRequest.exactly(configured(tmp_path / "scaled", "model.dropout=0", "training.precision=fp16"))
    )
    assert scaled.test.losses == pytest.approx(usual.test.losses, rel=5e-3)
    with pytest.raises(ConfigError, match=r"training\.checkpointed_blocks = 9, but the network has"):
        checkpointed = ("training.activation_checkpointing=full", "training.checkpointed_blocks=9")
        find_rate(RunRequest.exactly(configured(tmp_path / "checkpointed", *checkpointed)))


def test_a_place_that_holds_a_run_is_refused(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"holds a run\. Choose another --output for the range test"):
        find_rate(RunRequest.exactly(configured(tmp_path / "run")))
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_several_ranks_and_layouts_are_refused(configured: Configured, tmp_path: Path) -> None:
    config = configured(tmp_path / "out")
    with pytest.raises(UsageError, match="--find-learning-rate runs in one process"):
        find_rate(RunRequest.exactly(config, ranks=Ranks(1, 2)))
    with pytest.raises(ConfigError, match=r"parallel\.tensor = 2 asks for .*2 processes, and there is one"):
        find_rate(RunRequest.exactly(configured(tmp_path / "out", "parallel.tensor=2")))
    assert not (tmp_path / "out").exists()
