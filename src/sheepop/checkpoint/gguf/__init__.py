"""Reads and writes GGUF files, the format of llama.cpp and its descendants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.checkpoint.gguf.reader import GGUFFile, open_gguf, read_gguf
    from sheepop.checkpoint.gguf.writer import GGUFExport, write_gguf
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["GGUFExport", "GGUFFile", "open_gguf", "read_gguf", "write_gguf"]
