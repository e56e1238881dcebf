"""The state that a run needs besides its model to resume exactly: optimizer tensors, trained weights, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sheepop.checkpoint.model_directory import read_weights
from sheepop.checkpoint.run_directory import COUNTERS, FORMAT_VERSION, STATE, read_state_record
from sheepop.checkpoint.weight_files import WHOLE, Part, write_part
from sheepop.core.errors import CheckpointError, first_few
from sheepop.core.files import write_json

OPTIMIZER, TRAINED, SOURCE = "optimizer", "weights", "source"
"""Stems of the tensor files; each may be split into several parts."""
_MOST_NAMES = 5

# Returns the state slots of an optimizer for a parameter of one of its groups: each slot's shape, None for a number.
Slots = Callable[[torch.optim.Optimizer, Mapping[str, Any], Tensor], Mapping[str, tuple[int, ...] | None]]


@dataclass(frozen=True)
class OptimizerState:
    """Tensors and plain numbers by ``parameter/slot``, and the names of parameters without a state."""

    tensors: dict[str, Tensor]
    scalars: dict[str, float]
    without: list[str]


def write_training_state(
    directory: Path,
    optimizer: OptimizerState,
    counters: dict[str, Any],
    trained_weights: Mapping[str, Tensor] | None = None,
    source: Mapping[str, Tensor] | None = None,
    part: Part = WHOLE,
) -> None:
    """Writes ``state/`` in `directory`; all tensors must be on the CPU.

    `trained_weights` are needed if the model in `directory` has different ones, such as their moving average; `source`
    is the state of the source of steps, if it has one. If tensors are split into several files, other processes write
    their parts with `write_part_of_state`.
    """
    folder = directory / STATE
    write_part_of_state(directory, optimizer.tensors, trained_weights, part)
    if source:
        save_file(dict(source), folder / WHOLE.file(SOURCE))
    scalars = {"optimizer_scalars": optimizer.scalars, "without_optimizer_state": optimizer.without}
    write_json(folder / COUNTERS, {"format_version": FORMAT_VERSION, "counters": counters, **scalars})


def write_part_of_state(
    directory: Path, optimizer: Mapping[str, Tensor], trained_weights: Mapping[str, Tensor] | None, part: Part
) -> None:
    """Writes one part of the optimizer tensors and of the trained weights."""
    folder = directory / STATE
    folder.mkdir(exist_ok=True)
    write_part(folder, OPTIMIZER, optimizer, part)
    if trained_weights is not None:
        write_part(folder, TRAINED, trained_weights, part)


def read_training_state(
    directory: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[Tensor, str],
    slots: Slots,
    piece: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
) -> dict[str, Any]:
    """Restores the optimizers in place and returns the counters; `piece` selects this process's part of each tensor.

    Raises `CheckpointError` if a slot that `slots` lists is missing or has another shape, or if the state has a slot
    that belongs to no parameter.
    """
    folder = directory / STATE
    record = read_state_record(directory)
    tensors = {name: piece(name, whole) for name, whole in _read_parts(folder, OPTIMIZER).items()}
    found = {**tensors, **record["optimizer_scalars"]}
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
            own = tuple(value.shape) if isinstance(value, Tensor) else None
            if own != shape:
                raise CheckpointError(
                    f"{folder}: the optimizer state {key} does not belong to this run: it is {_kind(own)}, not "
                    f"{_kind(shape)}."
                )
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
    return record["counters"]


def read_trained_weights(directory: Path, *, expected: bool) -> dict[str, Tensor] | None:
    """Returns the trained weights if the model in `directory` has different ones (`expected`), otherwise None.

    Raises `CheckpointError` if such weights exist but are not expected, or are expected but missing.
    """
    folder = directory / STATE
    if expected:
        return _read_parts(folder, TRAINED)
    if files := sorted(folder.glob(f"{TRAINED}*.safetensors")):
        raise CheckpointError(
            f"{directory} has averaged weights, and the trained ones in {files[0]}, but this run does not average "
            "weights."
        )
    return None


def read_source_state(directory: Path) -> dict[str, Tensor]:
    """Returns the state of the source of steps, empty if it has none."""
    file = directory / STATE / WHOLE.file(SOURCE)
    return read_weights(file) if file.exists() else {}


def _read_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of all its parts."""
    first = next(folder.glob(f"{stem}-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"), None)
    count = 1 if first is None else int(first.stem.rpartition("-")[2])
    parts = [read_weights(folder / Part(number, count).file(stem)) for number in range(count)]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _kind(shape: tuple[int, ...] | None) -> str:
    return "a number" if shape is None else f"a tensor of shape {shape}"


def optimizer_state(optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str]) -> OptimizerState:
    """Returns the current state of all parameters; the tensors are shared with the optimizers."""
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
    """Yields each parameter with its optimizer and its group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter
