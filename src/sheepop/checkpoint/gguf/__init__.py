"""GGUF files, which llama.cpp and its descendants read."""

from sheepop.checkpoint.gguf.exporting import GGUFExport, write_gguf
from sheepop.checkpoint.gguf.importing import GGUFFile, open_gguf, read_gguf

__all__ = ["GGUFExport", "GGUFFile", "open_gguf", "read_gguf", "write_gguf"]
