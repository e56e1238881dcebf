"""Models, training states and runs on disk."""

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
    read_counters,
    read_training_state,
    write_training_state,
)

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
    "write_foreign_model",
    "write_model",
    "write_training_state",
]
