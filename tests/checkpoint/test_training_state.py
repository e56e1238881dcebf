"""The optimizer comes back exactly: the next step after loading equals the next step without."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.checkpoint.training_state import (
    optimizer_state,
    read_trained_weights,
    read_training_state,
    write_training_state,
)
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.optimizers.build import optimizer_slots

IDS = torch.arange(24).reshape(2, 12)


def step(model: Transformer, optimizers: list[torch.optim.Optimizer], shift: int) -> None:
    torch.autograd.backward(cross_entropy(model(IDS + shift), IDS))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def names_of(model: Transformer) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def configured(optimizer: str) -> TrainingConfig:
    schedule = "constant" if optimizer == "schedule_free_adamw" else "cosine"
    return TrainingConfig(optimizer=optimizer, schedule=schedule, learning_rate=0.01)


@pytest.mark.parametrize("optimizer", list(OPTIMIZER_NAMES))
def test_training_goes_on_bit_for_bit(tmp_path: Path, model: Transformer, optimizer: str) -> None:
    config = configured(optimizer)
    optimizers = build_optimizers(model, config)
    for number in range(3):
        step(model, optimizers, number)
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {"step": 3})

    copy = build_model(model.config, seed=99)
    copy.load_state_dict(model.state_dict())
    restored = build_optimizers(copy, config)
    assert read_training_state(tmp_path, restored, names_of(copy), optimizer_slots) == {"step": 3}

    for number in range(3, 6):
        step(model, optimizers, number)
        step(copy, restored, number)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name


def test_a_state_of_another_model_is_refused(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    step(model, optimizers, 0)
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {})
    other = build_model(ModelConfig(**{**model.config.model_dump(), "d_model": 32, "head_dim": 16, "d_ff": None}), 0)
    with pytest.raises(CheckpointError, match="does not belong to this run"):
        read_training_state(tmp_path, build_optimizers(other, TrainingConfig()), names_of(other), optimizer_slots)


def test_a_newer_state_is_refused(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {})
    file = tmp_path / "state" / "state.json"
    file.write_text(file.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CheckpointError, match="version 3"):
        read_training_state(tmp_path, optimizers, names_of(model), optimizer_slots)


@pytest.mark.parametrize("record", ["[]", "{}", '{"format_version": "2", "counters": {}, "optimizer_scalars": {}}'])
def test_what_is_no_state_is_refused(tmp_path: Path, model: Transformer, record: str) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {})
    (tmp_path / "state" / "state.json").write_text(record)
    with pytest.raises(CheckpointError, match=r"state\.json is not a training state"):
        read_training_state(tmp_path, optimizers, names_of(model), optimizer_slots)


@pytest.fixture
def stepped(tmp_path: Path, model: Transformer) -> Transformer:
    """A model whose AdamW took one step; its training state is in `tmp_path`."""
    optimizers = build_optimizers(model, TrainingConfig())
    step(model, optimizers, 0)
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {"step": 1})
    return model


def read(directory: Path, model: Transformer, optimizer: str = "adamw") -> dict[str, object]:
    return read_training_state(
        directory, build_optimizers(model, configured(optimizer)), names_of(model), optimizer_slots
    )


def test_every_missing_slot_is_named(tmp_path: Path, stepped: Transformer) -> None:
    file = tmp_path / "state" / "optimizer.safetensors"
    complete = load_file(file)
    for key in complete:
        save_file({name: tensor for name, tensor in complete.items() if name != key}, file)
        with pytest.raises(CheckpointError, match=f"the optimizer state {re.escape(key)} is missing"):
            read(tmp_path, stepped)


def test_of_many_missing_slots_a_few_are_named(tmp_path: Path, stepped: Transformer) -> None:
    file = tmp_path / "state" / "optimizer.safetensors"
    count = len(load_file(file))
    save_file({}, file)
    with pytest.raises(CheckpointError, match=rf"embedding\.weight/step, .* and {count - 5} more is missing"):
        read(tmp_path, stepped)


def test_a_missing_number_is_named_too(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, configured("adafactor"))
    step(model, optimizers, 0)
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {})
    file = tmp_path / "state" / "state.json"
    record = json.loads(file.read_text())
    del record["optimizer_scalars"]["final_norm.weight/step"]
    file.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"final_norm\.weight/step is missing"):
        read(tmp_path, model, "adafactor")


@pytest.mark.parametrize("other", ["lion", "sgd", "adafactor", "muon", "schedule_free_adamw"])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, stepped: Transformer, other: str) -> None:
    with pytest.raises(CheckpointError, match="does not belong to this run"):
        read(tmp_path, stepped, other)


def test_what_was_refused_changed_nothing(tmp_path: Path, stepped: Transformer) -> None:
    file = tmp_path / "state" / "optimizer.safetensors"
    tensors = load_file(file)
    del tensors["final_norm.weight/exp_avg"]
    save_file(tensors, file)
    optimizers = build_optimizers(stepped, TrainingConfig())
    with pytest.raises(CheckpointError, match="is missing"):
        read_training_state(tmp_path, optimizers, names_of(stepped), optimizer_slots)
    assert not any(optimizers[0].state.values())


def test_a_state_before_the_first_step_undoes_steps(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {"step": 0})
    step(model, optimizers, 0)
    assert read_training_state(tmp_path, optimizers, names_of(model), optimizer_slots) == {"step": 0}
    assert not any(optimizers[0].state.values())


def test_a_parameter_that_had_no_gradient_yet_may_lack_its_slots(tmp_path: Path, model: Transformer) -> None:
    optimizers = build_optimizers(model, TrainingConfig())
    torch.autograd.backward(cross_entropy(model(IDS), IDS))
    model.final_norm.weight.grad = None
    optimizers[0].step()
    write_training_state(tmp_path, optimizer_state(optimizers, names_of(model)), {})
    restored = build_optimizers(model, TrainingConfig())
    read_training_state(tmp_path, restored, names_of(model), optimizer_slots)
    assert not restored[0].state[model.final_norm.weight]
    assert restored[0].state[model.embedding.weight]


def test_a_state_of_the_first_version_is_read(tmp_path: Path, stepped: Transformer) -> None:
    file = tmp_path / "state" / "state.json"
    record = json.loads(file.read_text())
    del record["without_optimizer_state"]
    file.write_text(json.dumps({**record, "format_version": 1}))
    assert read(tmp_path, stepped) == {"step": 1}


def test_trained_weights_are_read_where_they_are_expected_and_refused_where_they_are_not(
    tmp_path: Path, model: Transformer
) -> None:
    state = optimizer_state(build_optimizers(model, TrainingConfig()), names_of(model))
    for name, trained in (("averaged", {"a": torch.ones(2)}), ("plain", None)):
        (tmp_path / name).mkdir()
        write_training_state(tmp_path / name, state, {}, trained)
    found = read_trained_weights(tmp_path / "averaged", expected=True)
    assert found is not None and found["a"].tolist() == [1.0, 1.0]
    assert read_trained_weights(tmp_path / "plain", expected=False) is None
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is missing"):
        read_trained_weights(tmp_path / "plain", expected=True)
    with pytest.raises(CheckpointError, match=r"has averaged weights, .* but this run does not average weights"):
        read_trained_weights(tmp_path / "averaged", expected=False)
