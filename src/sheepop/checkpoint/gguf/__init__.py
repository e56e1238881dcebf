"""GGUF files, which llama.cpp and its descendants read."""

from sheepop.checkpoint.gguf.reader import GGUFFile, open_gguf, read_gguf
from sheepop.checkpoint.gguf.writer import GGUFExport, write_gguf

__all__ = ["GGUFExport", "GGUFFile", "open_gguf", "read_gguf", "write_gguf"]
