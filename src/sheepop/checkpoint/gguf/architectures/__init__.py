"""What each architecture of llama.cpp computes, and what it calls its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.checkpoint.gguf.architectures.rotary import DIVISORS
    from sheepop.checkpoint.gguf.architectures.rows import EMBEDDING_NAME, OUTPUT_NAME, POSITIONS_NAME, Role, Row
    from sheepop.checkpoint.gguf.architectures.tables import ARCHITECTURES, Architecture
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ARCHITECTURES",
    "DIVISORS",
    "EMBEDDING_NAME",
    "OUTPUT_NAME",
    "POSITIONS_NAME",
    "Architecture",
    "Role",
    "Row",
]
