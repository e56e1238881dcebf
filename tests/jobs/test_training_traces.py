"""A prompt that is traced while a run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import ConfigError
from sheepop.interpret.store import StoredTrace
from sheepop.interpret.trace import Trace
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.run.open import find_resumable

from ..running import train

STEPS = (
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.sample_interval=2",
    "training.checkpoint_interval=1",
    "trace.prompt=Sheep",
    "training.max_steps=4",
)


def test_traces_are_those_of_the_checkpoints(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    run = RunDirectory.open(train(configured(tmp_path / "run", *STEPS)).run)
    assert sorted(path.name for path in run.traces.iterdir()) == ["step-00000000", "step-00000002", "step-00000004"]
    for step in (2, 4):
        loaded = load_model(run.checkpoint(step))
        expected = Trace.of(loaded.model, loaded.tokenizer, "Sheep")
        found = StoredTrace.open(run.traces / f"step-{step:08d}")
        assert found.manifest["step"] == step and found.manifest["prompt"] == "Sheep"
        assert torch.equal(found.read("residuals"), expected.residuals)
        assert torch.equal(found.read("blocks.0.attention.weights"), expected["blocks.0.attention.weights"])


def test_a_resumed_run_has_the_same_traces(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    train(configured(tmp_path / "whole", *STEPS))
    train(configured(tmp_path / "run", *STEPS, "training.max_steps=3"))
    stored = find_resumable(tmp_path / "run")
    assert stored is not None
    train(load_config(overrides=["training.max_steps=4"], base=stored.record.requested), resume=True)
    whole, resumed = (
        place / "traces/step-00000004/trace.safetensors" for place in (tmp_path / "whole", tmp_path / "run")
    )
    assert whole.read_bytes() == resumed.read_bytes()


def test_a_prompt_that_cannot_be_traced_is_refused(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.prompt: The prompt has 40 tokens, but the model reads 32"):
        train(configured(tmp_path / "run", *STEPS, f"trace.prompt={'x' * 40}"))
    assert not (tmp_path / "run").exists()
