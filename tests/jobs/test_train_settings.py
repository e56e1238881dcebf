"""Optimizers, schedules and averaged weights through a whole run: what is refused early, and what is used later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sheepop.checkpoint import load_model
from sheepop.checkpoint.model_directory import read_weights
from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, StorageError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.train import TrainOutcome

from ..running import train

Run = Callable[..., TrainOutcome]


@pytest.fixture
def run(configured: Callable[..., SheepOpConfig]) -> Run:
    """Ten steps into a directory, with more settings if given, every one of them logged."""
    return lambda output, *overrides, resume=False, job=train: job(
        configured(output, "training.max_steps=10", "training.log_interval=1", *overrides), resume=resume
    )


def test_a_pattern_without_a_match_is_refused_before_anything_is_left(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches 'block\.\*'"):
        run(tmp_path / "run", "training.layers=[{pattern: block.*}]")
    assert not (tmp_path / "run").exists()


def test_a_backend_that_this_machine_lacks_is_refused_before_anything_is_left(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flex needs an NVIDIA GPU"):
        run(tmp_path / "run", "device=cpu", "model.attention_backend=flex", "model.dropout=0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [
        (
            ("training.schedule=wsd", "training.warmup_steps=2"),
            [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1 - 0.5**0.5],
        ),
        (
            ("training.schedule=piecewise", "training.schedule_points=[[0, 0.2], [4, 1], [8, 0.5]]"),
            [0.2, 0.4, 0.6, 0.8, 1, 0.875, 0.75, 0.625, 0.5, 0.5],
        ),
        (
            ("training.schedule=inverse_sqrt", "training.warmup_steps=4"),
            [0.25, 0.5, 0.75, 1, *((4 / t) ** 0.5 for t in range(5, 11))],
        ),
        (
            ("training.schedule=linear", "training.warmup_steps=2", "training.min_learning_rate=0.002"),
            [0.5, 1, *(1 - 0.1 * step for step in range(8))],
        ),
    ],
    ids=["wsd", "piecewise", "inverse_sqrt", "linear to a minimum"],
)
def test_the_rates_of_a_run_are_those_of_its_schedule(
    run: Run, tmp_path: Path, overrides: tuple[str, ...], rates: list[float]
) -> None:
    run(tmp_path / "run", "training.learning_rate=0.01", *overrides)
    rows = [row for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")[0] if row["split"] == "train"]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.01 * rate for rate in rates])


def test_the_share_of_the_peak_counts_rows_as_long_as_they_are(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", "training.sequence_length_warmup=[[4, 8]]")
    rows = [row for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")[0] if row["split"] == "train"]
    peak = json.loads((tmp_path / "run" / "environment.json").read_text())["matrix_peak_flops"]
    weights = load_model(tmp_path / "run").model.state_dict()
    matrices = sum(weight.numel() for name, weight in weights.items() if "_proj.weight" in name)
    # Two operations a weight and two products of 16 numbers a key, forward, and twice that backward; a token of a row
    # of T tokens sees (T + 1) / 2 keys in the mean. The output matrix multiplies the tokens with a label.
    labels = np.diff([0, *(row["tokens"] for row in rows)]) / (4 * 32)
    lengths = np.array([8] * 4 + [32] * 6)
    expected = 3 * (2 * matrices + 4 * 16 * (lengths + 1) / 2 + 2 * 128 * 16 * labels)
    found = [row["mfu"] * peak / row["tokens_per_second"] for row in rows]
    assert found == pytest.approx(expected.tolist())


def test_whatever_takes_a_run_takes_its_averaged_weights(run: Run, tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", "training.ema_decay=0.9", "training.learning_rate=0.02")
    rows = [row for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")[0] if row["split"] == "validation"]
    assert outcome.scores is not None
    assert outcome.scores.loss == pytest.approx(min(row["loss"] for row in rows))
    loaded = load_model(tmp_path / "run")
    trained = read_weights(loaded.directory / "state" / "weights.safetensors")
    assert not torch.equal(loaded.model.embedding.weight, trained["embedding.weight"])


def test_customary_settings_are_written_into_the_run(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", "training.optimizer=lion", "training.schedule=wsd")
    written = read_config_file(tmp_path / "run" / "config.yaml")["training"]
    assert (written["betas"], written["decay_steps"], written["eps"]) == ([0.9, 0.99], 2, None)


def test_validations_that_there_is_no_text_for_are_warned_of(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("training.max_steps=2", "data.validation_fraction=0")
    train(configured(tmp_path / "silent", *overrides), console=Console(quiet=True))
    assert "validations" not in capsys.readouterr().err
    train(configured(tmp_path / "warned", *overrides, "training.eval_interval=1"), console=Console(quiet=True))
    assert "no text is held out, so there will be no validations" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_says_that_training_is_done(run: Run, tmp_path: Path) -> None:
    report = run(tmp_path / "run", job=train).run / "report.html"
    report.unlink()
    report.mkdir()
    (report / "in the way").touch()
    with pytest.raises(StorageError, match=r"report\.html.*Training itself is finished.*train --resume"):
        run(tmp_path / "run", resume=True, job=train)
    (report / "in the way").unlink()
    report.rmdir()
    run(tmp_path / "run", resume=True, job=train)
    assert report.is_file()
