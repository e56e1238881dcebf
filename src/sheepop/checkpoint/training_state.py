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
from sheepop.checkpoint.weight_files import WHOLE, Part, write_part
from sheepop.core.errors import CheckpointError, first_few
from sheepop.core.files import write_json

OPTIMIZER, TRAINED, SOURCE = "optimizer", "weights", "source"
"""The files of tensors, without the ending: each may be divided over several."""
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
    part: Part = WHOLE,
) -> None:
    """Writes ``state/`` below `directory`; all tensors are on the CPU.

    `trained_weights` are given when the model in `directory` has others, such as their moving average; `source` is the
    state of where steps come from, where it has one. Of tensors that are divided over several files, others write their
    parts with `write_part_of_state`.
    """
    folder = directory / STATE
    write_part_of_state(directory, optimizer.tensors, trained_weights, part)
    if source:
        save_file(dict(source), folder / WHOLE.file(SOURCE))
    write_json(
        folder / COUNTERS,
        {
            "format_version": FORMAT_VERSION,
            "counters": counters,
            "optimizer_scalars": optimizer.scalars,
            "without_optimizer_state": optimizer.without,
        },
    )


def write_part_of_state(
    directory: Path, optimizer: Mapping[str, Tensor], trained_weights: Mapping[str, Tensor] | None, part: Part
) -> None:
    """Writes one part of the tensors of optimizers and of the trained weights."""
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
    """Restores the optimizers in place, each tensor to its `piece`, and returns the counters.

    Raises `CheckpointError` when a slot that the optimizers have by `slots` is missing, when one does not belong to
    them, and when a parameter had no state although the optimizer steps it.
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
    """The state of where steps come from; nothing where it had none."""
    file = directory / STATE / WHOLE.file(SOURCE)
    return read_weights(file) if file.exists() else {}


def _read_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """The tensors of a file, or of all the files that they are divided over."""
    first = next(folder.glob(f"{stem}-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"), None)
    count = 1 if first is None else int(first.stem.rpartition("-")[2])
    found = {}
    for number in range(count):
        found.update(read_weights(folder / Part(number, count).file(stem)))
    return found


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
