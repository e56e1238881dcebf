"""The LoRA adapter of a model directory: its tensors, and how they are loaded into a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from sheepop.adapt.lora import LowRank, activate, adapted_layers, put
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head
from sheepop.checkpoint.expected_tensors import tensor_problems
from sheepop.checkpoint.weight_files import listed
from sheepop.core.errors import CheckpointError
from sheepop.model import Transformer

_HEAD = f"{REWARD_HEAD}.weight"
NAME = "default"
"""The name of the single adapter that a model directory can have."""


def changes_of(model: Transformer) -> dict[str, Tensor]:
    """Returns the tensors of all adapters in a network by their parameter names, and its reward head."""
    changes = {
        f"{path}.changes.{name}": tensor.detach()
        for path, layer in adapted_layers(model).items()
        for name, tensor in layer.changes.named_parameters()
    }
    head = getattr(model, REWARD_HEAD, None)
    return changes if head is None else {**changes, _HEAD: head.weight.detach()}


def put_changes(
    model: Transformer, config: LoraConfig, tensors: Mapping[str, Tensor], source: Path, *, name: str = NAME
) -> None:
    """Adds an adapter, read from `source`, to the model as `name`, and makes it the only active one.

    Also adds a reward head if `tensors` has one. Raises `CheckpointError` for tensors that are missing, have the wrong
    shape, or belong to no layer.
    """
    modules = dict(model.named_modules())
    if _HEAD in tensors:
        add_scalar_head(model, REWARD_HEAD)
    for path in dict.fromkeys(key.partition(".changes.")[0] for key in tensors if key != _HEAD):
        down, up, magnitude = (tensors.get(f"{path}.changes.{NAME}.{part}") for part in ("down", "up", "magnitude"))
        if path not in modules or down is None or up is None:
            raise CheckpointError(f"{source} does not fit its model: {path} is not a layer of it, or lacks a tensor.")
        rows, length = modules[path].weight.shape
        expected = (length, rows) if isinstance(modules[path], nn.Embedding) else (rows, length)
        if (up.shape[0], down.shape[-1]) != expected or up.shape[-1] != down.shape[0]:
            raise CheckpointError(f"{source} does not fit its model: the adapter of {path} has the wrong shape.")
        lengths = None if magnitude is None else magnitude.clone()
        put(model, path, name, LowRank(config, down.clone(), up.clone(), lengths))
    infix = f".changes.{name}."
    made = changes_of(model).items()
    placed = {key.replace(infix, f".changes.{NAME}."): each for key, each in made if infix in key or key == _HEAD}
    copy_changes(tensors, placed, source)
    activate(model, name)


def copy_changes(found: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Path) -> None:
    """Copies tensors; raises `CheckpointError` naming each that is missing, unexpected or of the wrong shape."""
    shapes, wanted = ({name: tuple(each.shape) for name, each in tensors.items()} for tensors in (found, own))
    if problems := tensor_problems(shapes, wanted):
        raise CheckpointError(f"The weights in {source} do not fit their model: {listed(problems)}.")
    for name, tensor in own.items():
        tensor.copy_(found[name])
