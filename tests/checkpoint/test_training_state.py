"""The optimizer comes back exactly: the next step after loading equals the next step without."""

from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import optimizer_state, read_training_state, write_training_state
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig, Transformer, build_model, cross_entropy
from sheepop.train import TrainingConfig, build_optimizers

IDS = torch.arange(24).reshape(2, 12)


def step(model: Transformer, optimizers: list[torch.optim.Optimizer], shift: int) -> None:
    torch.autograd.backward(cross_entropy(model(IDS + shift), IDS))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def names_of(model: Transformer) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, model: Transformer, optimizer: str) -> None:
    config = TrainingConfig(optimizer=optimizer, learning_rate=0.01)
    optimizers = build_optimizers(model, config)
    for number in range(3):
        step(model, optimizers, number)
    write_training_state(tmp_path, *optimizer_state(optimizers, names_of(model)), {"step": 3})

    copy = build_model(model.config, seed=99)
    copy.load_state_dict(model.state_dict())
    restored = build_optimizers(copy, config)
    assert read_training_state(tmp_path, restored, names_of(copy)) == {"step": 3}

    for number in range(3, 6):
        step(model, optimizers, number)
        step(copy, restored, number)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name


def test_a_state_of_another_model_is_refused(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    step(model, optimizers, 0)
    write_training_state(tmp_path, *optimizer_state(optimizers, names_of(model)), {})
    other = build_model(ModelConfig(**{**model.config.model_dump(), "d_model": 32, "head_dim": 16, "d_ff": None}), 0)
    with pytest.raises(CheckpointError, match="does not belong to this run"):
        read_training_state(tmp_path, build_optimizers(other, TrainingConfig()), names_of(other))


def test_a_newer_state_is_refused(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    write_training_state(tmp_path, *optimizer_state(optimizers, names_of(model)), {})
    file = tmp_path / "state" / "state.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="version 2"):
        read_training_state(tmp_path, optimizers, names_of(model))
