"""What each architecture of llama.cpp computes, and what it calls its tensors."""

from sheepop.checkpoint.gguf.architectures.rotary import DIVISORS
from sheepop.checkpoint.gguf.architectures.rows import EMBEDDING_NAME, OUTPUT_NAME, POSITIONS_NAME, Role, Row
from sheepop.checkpoint.gguf.architectures.tables import ARCHITECTURES, Architecture

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
