"""Weights in fewer bits say nearly what the trained ones said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.errors import UsageError
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.quantize import quantize_model

from ..running import train


@pytest.fixture(scope="module")
def trained(configured: Callable[..., SheepOpConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of width 64 that has learnt its text: 1.5 nats fewer than at the beginning."""
    sizes = ("model.d_model=64", "model.num_layers=2", "model.dropout=0", "training.max_steps=80")
    rate = ("training.optimizer=muon", "training.learning_rate=0.01", "training.global_batch_size=16")
    run = train(configured(tmp_path_factory.mktemp("trained") / "run", *sizes, *rate))
    assert run.scores is not None and run.scores.loss < 1.0
    return run.run


@pytest.mark.parametrize(("to", "share"), [("int8", 0.01), ("int4", 0.05), ("fp8", 0.02)])
def test_the_perplexity_of_a_trained_model_stays(
    trained: Path, text_folder: Path, tmp_path: Path, to: str, share: float
) -> None:
    text = "".join(file.read_text() for file in sorted(text_folder.iterdir()))
    found = quantize_model(trained, tmp_path / to, to=to, text=text)
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=share)


def test_int4_may_be_calibrated_on_a_text(trained: Path, text_folder: Path, tmp_path: Path) -> None:
    text = "".join(file.read_text() for file in sorted(text_folder.iterdir()))
    found = quantize_model(trained, tmp_path / "calibrated", to="int4", text=text, calibration=text)
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=0.02)
    with pytest.raises(UsageError, match="calibration is for int4, not for int8"):
        quantize_model(trained, tmp_path / "no", to="int8", text=text, calibration=text)
    with pytest.raises(UsageError, match="for calibration is empty"):
        quantize_model(trained, tmp_path / "no", to="int4", text=text, calibration="")
