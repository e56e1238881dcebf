"""Reads and writes models, training states and run directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.checkpoint.adapted import with_adapters
    from sheepop.checkpoint.counters import read_counters
    from sheepop.checkpoint.model_directory import (
        LoadedModel,
        load_model,
        open_model,
        save_model,
        write_foreign_model,
        write_model,
    )
    from sheepop.checkpoint.run_directory import RunDirectory, resolve_model_directory
    from sheepop.checkpoint.training_state import (
        optimizer_state,
        read_training_state,
        write_training_state,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "LoadedModel",
    "RunDirectory",
    "load_model",
    "open_model",
    "optimizer_state",
    "read_counters",
    "read_training_state",
    "resolve_model_directory",
    "save_model",
    "with_adapters",
    "write_foreign_model",
    "write_model",
    "write_training_state",
]
