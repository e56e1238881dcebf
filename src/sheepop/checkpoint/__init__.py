"""Reads and writes models, training states and run directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.checkpoint.adapted import with_adapters
    from sheepop.checkpoint.model_directory import LoadedModel, load_model, save_model
    from sheepop.checkpoint.model_source import resolve_model_directory
    from sheepop.checkpoint.run_directory import RunDirectory
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["LoadedModel", "RunDirectory", "load_model", "resolve_model_directory", "save_model", "with_adapters"]
