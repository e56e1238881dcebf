"""Tokenizers: training a vocabulary, reading published ones, decoding a stream, chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.tokenizer.byte_level import ByteLevelBPE
    from sheepop.tokenizer.character import CharTokenizer
    from sheepop.tokenizer.chat import ChatTemplate, chat_templates
    from sheepop.tokenizer.config import TokenizerConfig
    from sheepop.tokenizer.files import holds_tokenizer, load_tokenizer, tokenizer_from_json, tokenizer_from_tables
    from sheepop.tokenizer.interface import SpecialRole, StreamDecoder, Tokenizer
    from sheepop.tokenizer.training import train_tokenizer
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ByteLevelBPE",
    "CharTokenizer",
    "ChatTemplate",
    "SpecialRole",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerConfig",
    "chat_templates",
    "holds_tokenizer",
    "load_tokenizer",
    "tokenizer_from_json",
    "tokenizer_from_tables",
    "train_tokenizer",
]
