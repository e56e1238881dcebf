"""The ``tokenizer`` subtree of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from sheepop.core.config import Config, PathText

# Four special tokens and what the vocabulary holds before any training: 256 bytes, the 124 other ASCII characters, the
# printable ones (and their forms inside words, of letters and digits), or bytes and printable characters.
SMALLEST_VOCABULARY = {"bpe": 260, "char": 128, "wordpiece": 160, "unigram": 355}


class TokenizerConfig(Config):
    """Which tokenizer to use, or how to train one.

    `vocab_size` is the exact size, except for ``char``: there it is the largest size allowed, and the size is 128 plus
    the other characters found. `path` names a tokenizer to use instead of training one. Training reads at most
    `max_training_bytes` of UTF-8 text, from the start of the corpus.
    """

    algorithm: Literal["bpe", "wordpiece", "unigram", "char"] = "bpe"
    pattern: Literal["llama3", "sheepop", "gpt2"] = Field(
        default="llama3",
        description="where bpe cuts text into parts: as Llama 3 does, by our rules for code, or as GPT-2 does",
    )
    vocab_size: int = Field(default=4096, le=2**24)
    path: PathText | None = None
    max_training_bytes: int = Field(default=64 * 2**20, ge=1)

    @field_validator("vocab_size")
    @classmethod
    def _holds_the_alphabet(cls, value: int, info: ValidationInfo) -> int:
        algorithm = info.data.get("algorithm", "bpe")
        smallest = SMALLEST_VOCABULARY[algorithm]
        if value < smallest:
            raise ValueError(f"a {algorithm} vocabulary has at least {smallest} tokens")
        return value

    @model_validator(mode="after")
    def _pattern_is_read(self) -> TokenizerConfig:
        if self.pattern != "llama3" and self.algorithm != "bpe":
            raise ValueError(f"pattern: {self.pattern} is for algorithm: bpe, not {self.algorithm}")
        return self
