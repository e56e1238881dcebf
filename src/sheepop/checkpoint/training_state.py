"""What a training run needs beside its weights to go on exactly: optimizer tensors and a few counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sheepop.checkpoint.model_directory import read_weights
from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json, write_json

FORMAT_VERSION = 1
OPTIMIZER = "optimizer.safetensors"
COUNTERS = "state.json"


def write_training_state(
    directory: Path, optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str], counters: dict[str, Any]
) -> None:
    """Writes ``state/`` below `directory`: every optimizer tensor by parameter name, and `counters` as JSON."""
    folder = directory / "state"
    folder.mkdir()
    tensors, scalars = _flatten(optimizers, names)
    save_file(tensors, folder / OPTIMIZER)
    write_json(
        folder / COUNTERS,
        {"format_version": FORMAT_VERSION, "counters": counters, "optimizer_scalars": scalars},
    )


def read_training_state(
    directory: Path, optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str]
) -> dict[str, Any]:
    """Restores the optimizers in place and returns the counters; raises `CheckpointError` when they do not fit."""
    folder = directory / "state"
    record = _read_record(folder)
    by_name = {names[parameter]: (optimizer, parameter) for optimizer, parameter in _parameters(optimizers)}
    for key, value in {**read_weights(folder / OPTIMIZER), **record["optimizer_scalars"]}.items():
        name, _, slot = key.rpartition("/")
        owner, parameter = by_name.get(name, (None, None))
        tensor = isinstance(value, Tensor)
        if owner is None or parameter is None or (tensor and value.ndim and value.shape != parameter.shape):
            raise CheckpointError(f"{folder}: the optimizer state {key} does not belong to this run.")
        owner.state[parameter][slot] = value.to(parameter.device) if tensor else value
    counters: dict[str, Any] = record["counters"]
    return counters


def read_counters(directory: Path) -> dict[str, Any]:
    """The counters of the checkpoint in `directory` alone; raises `CheckpointError` when there are none."""
    counters: dict[str, Any] = _read_record(directory / "state")["counters"]
    return counters


def _read_record(folder: Path) -> dict[str, Any]:
    record = read_json(folder / COUNTERS)
    if not isinstance(record, dict) or not isinstance(record.get("format_version"), int) or "counters" not in record:
        raise CheckpointError(f"{folder / COUNTERS} is not a training state.")
    if record["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has training-state version {record['format_version']}; this SheepOp reads up to "
            f"{FORMAT_VERSION}. Install a newer SheepOp."
        )
    return record


def _flatten(
    optimizers: Sequence[torch.optim.Optimizer], names: dict[Tensor, str]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for optimizer, parameter in _parameters(optimizers):
        for slot, value in optimizer.state[parameter].items():
            key = f"{names[parameter]}/{slot}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach().cpu().contiguous()
            else:
                scalars[key] = value
    return tensors, scalars


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, parameter
