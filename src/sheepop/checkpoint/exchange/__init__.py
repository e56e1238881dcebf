"""Reads and writes models in the format of Hugging Face's transformers, with one table for each model family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.checkpoint.exchange.choice import FAMILIES, choose_family, obstacles
    from sheepop.checkpoint.exchange.equivalence import training_differences
    from sheepop.checkpoint.exchange.family import Family
    from sheepop.checkpoint.exchange.passage import converted, dtype_named, reported, watched
    from sheepop.checkpoint.exchange.reader import read_hugging_face, same_values
    from sheepop.checkpoint.exchange.writer import write_hugging_face
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "FAMILIES",
    "Family",
    "choose_family",
    "converted",
    "dtype_named",
    "obstacles",
    "read_hugging_face",
    "reported",
    "same_values",
    "training_differences",
    "watched",
    "write_hugging_face",
]
