"""SheepOp: a language model's whole life, from a folder of files to a model that writes.

``import sheepop`` loads no heavy library; the names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sheepop.language_model import LanguageModel, load, load_tokenizer

__version__ = "0.1.0"
__all__ = ["LanguageModel", "__version__", "load", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name in ("LanguageModel", "load", "load_tokenizer"):
        from sheepop import language_model

        return getattr(language_model, name)
    raise AttributeError(f"module 'sheepop' has no attribute {name!r}")
