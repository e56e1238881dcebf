"""What a training run needs beside its model to go on exactly: optimizer tensors, trained weights, a few counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sheepop.checkpoint.counters import COUNTERS, FORMAT_VERSION, STATE, read_state_record
from sheepop.checkpoint.model_directory import read_weights
from sheepop.core.errors import CheckpointError, first_few
from sheepop.core.files import write_json

OPTIMIZER = "optimizer.safetensors"
TRAINED = "weights.safetensors"
SOURCE = "source.safetensors"
_MOST_NAMES = 5

# The slots that an optimizer has for a member of one of its groups: the shape of each, None for a number.
Slots = Callable[[torch.optim.Optimizer, Mapping[str, Any], Tensor], Mapping[str, tuple[int, ...] | None]]


@dataclass(frozen=True)
class OptimizerState:
    """Tensors and plain numbers by ``parameter/slot``, and the names of parameters that have no state yet."""

    tensors: dict[str, Tensor]
    scalars: dict[str, float]
    without: list[str]


def write_training_state(
    directory: Path,
    optimizer: OptimizerState,
    counters: dict[str, Any],
    trained_weights: Mapping[str, Tensor] | None = None,
    source: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes ``state/`` below `directory`; all tensors are on the CPU.

    `trained_weights` are given when the model in `directory` has others, such as their moving average; `source` is the
    state of where steps come from, where it has one.
    """
    folder = directory / STATE
    folder.mkdir()
    save_file(optimizer.tensors, folder / OPTIMIZER)
    if trained_weights is not None:
        save_file(dict(trained_weights), folder / TRAINED)
    if source:
        save_file(dict(source), folder / SOURCE)
    write_json(
        folder / COUNTERS,
        {
            "format_version": FORMAT_VERSION,
            "counters": counters,
            "optimizer_scalars": optimizer.scalars,
            "without_optimizer_state": optimizer.without,
        },
    )


def read_training_state(
    directory: Path, optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str], slots: Slots
) -> dict[str, Any]:
    """Restores the optimizers in place and returns the counters.

    Raises `CheckpointError` when a slot that the optimizers have by `slots` is missing, when one does not belong to
    them, and when a parameter had no state although the optimizer steps it.
    """
    folder = directory / STATE
    record = read_state_record(directory)
    found = {**read_weights(folder / OPTIMIZER), **record["optimizer_scalars"]}
    without = set(record.get("without_optimizer_state", ()))  # version 1 had no such list
    states: list[tuple[dict[str, Any], dict[str, Any]]] = []
    missing = []
    for optimizer, group, parameter in _parameters(optimizers):
        name = names[parameter]
        restored: dict[str, Any] = {}
        for slot, shape in slots(optimizer, group, parameter).items() if name not in without else ():
            key = f"{name}/{slot}"
            if key not in found:
                missing.append(key)
                continue
            value = found.pop(key)
            _check_shape(value, shape, f"{folder}: the optimizer state {key}")
            restored[slot] = value.to(parameter.device) if isinstance(value, Tensor) else value
        states.append((optimizer.state[parameter], restored))
    if found:
        raise CheckpointError(
            f"{folder}: the optimizer state {first_few(found, _MOST_NAMES)} does not belong to this run."
        )
    if missing:
        raise CheckpointError(f"{folder}: the optimizer state {first_few(missing, _MOST_NAMES)} is missing.")
    for state, restored in states:
        state.clear()
        state.update(restored)
    counters: dict[str, Any] = record["counters"]
    return counters


def read_trained_weights(directory: Path, *, expected: bool) -> dict[str, Tensor] | None:
    """The weights that are trained, where the model in `directory` has others; None where it has the same.

    Raises `CheckpointError` when there are such weights and none are expected, or the other way round.
    """
    file = directory / STATE / TRAINED
    if expected:
        return read_weights(file)
    if file.exists():
        raise CheckpointError(
            f"{directory} has averaged weights, and the trained ones in {file}, but this run does not average weights."
        )
    return None


def read_source_state(directory: Path) -> dict[str, Tensor]:
    """The state of where steps come from; nothing where it had none."""
    file = directory / STATE / SOURCE
    return read_weights(file) if file.exists() else {}


def _check_shape(value: Any, expected: tuple[int, ...] | None, what: str) -> None:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape != expected:
        raise CheckpointError(f"{what} does not belong to this run: it is {_kind(shape)}, not {_kind(expected)}.")


def _kind(shape: tuple[int, ...] | None) -> str:
    return "a number" if shape is None else f"a tensor of shape {shape}"


def optimizer_state(optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str]) -> OptimizerState:
    """The state of every parameter as it is now; the tensors are the optimizers' own."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    without = []
    for optimizer, _, parameter in _parameters(optimizers):
        if not optimizer.state.get(parameter):
            without.append(names[parameter])
        for slot, value in optimizer.state.get(parameter, {}).items():
            key = f"{names[parameter]}/{slot}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach()
            else:
                scalars[key] = value
    return OptimizerState(tensors, scalars, without)


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
    """Every parameter with its optimizer and its group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter
