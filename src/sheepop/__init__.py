"""SheepOp: a language model's whole life, from a folder of files to a model that writes.

``import sheepop`` loads no heavy library; the names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.language_model import LanguageModel, load, load_tokenizer
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__version__ = "0.1.0"
__all__ = ["LanguageModel", "__version__", "load", "load_tokenizer"]
