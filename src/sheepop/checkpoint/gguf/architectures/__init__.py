"""What each architecture of llama.cpp computes, and what it calls its tensors."""

from sheepop.checkpoint.gguf.architectures.rotary import DIVISORS
from sheepop.checkpoint.gguf.architectures.rows import Role, Row
from sheepop.checkpoint.gguf.architectures.tables import ARCHITECTURES, Architecture

__all__ = ["ARCHITECTURES", "DIVISORS", "Architecture", "Role", "Row"]
