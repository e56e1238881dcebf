"""The JSON part of a training state, ``state/state.json`` in a checkpoint, with the run's progress counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json

FORMAT_VERSION = 2
STATE = "state"
COUNTERS = "state.json"


def read_counters(checkpoint: Path) -> dict[str, Any]:
    """Reads only the counters of `checkpoint`; raises `CheckpointError` if there are none."""
    return read_state_record(checkpoint)["counters"]


def read_state_record(checkpoint: Path) -> dict[str, Any]:
    """Reads counters and optimizer scalars; raises `CheckpointError` for an unknown format."""
    folder = checkpoint / STATE
    record = read_json(folder / COUNTERS)
    version = record.get("format_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or not {"counters", "optimizer_scalars"} <= record.keys():
        raise CheckpointError(f"{folder / COUNTERS} is not a training state.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has training-state version {version}; this SheepOp reads up to "
            f"{FORMAT_VERSION}. Install a newer SheepOp."
        )
    return record
