"""The ``tokenizer`` subtree of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from sheepop.core.config import Config, PathText

# Four special tokens and the base of each vocabulary: 256 bytes, the 124 other ASCII characters, the printable ones
# (and the forms of letters and digits inside words), or bytes, printable characters and the space.
SMALLEST_VOCABULARY = {"bpe": 260, "char": 128, "wordpiece": 160, "unigram": 355}


class TokenizerConfig(Config):
    """Which tokenizer to use, or how to train one."""

    algorithm: Literal["bpe", "wordpiece", "unigram", "char"] = "bpe"
    """The algorithm to train: `bpe` (byte-level byte-pair encoding), `wordpiece`, `unigram` or `char` (one token per
    character)."""
    pattern: Literal["llama3", "sheepop", "gpt2"] = "llama3"
    """How `bpe` cuts text into parts before it merges: `llama3` (Llama 3's rules, which llama.cpp supports),
    `sheepop` (fewer tokens for code, but no export of the tokenizer to GGUF) or `gpt2` (GPT-2's rules, which
    llama.cpp supports too)."""
    vocab_size: int = Field(default=4096, le=2**24)
    """The exact size for `bpe` (260 or more), `wordpiece` (160) and `unigram` (355); the largest size allowed for
    `char` (128 or more)."""
    path: PathText | None = None
    """A tokenizer to use instead of training one: a directory or a file; `null` trains one."""
    max_training_bytes: int = Field(default=64 * 2**20, ge=1)
    """The most bytes of UTF-8 text to train on, from the start of the corpus."""

    @field_validator("vocab_size")
    @classmethod
    def _holds_the_alphabet(cls, value: int, info: ValidationInfo) -> int:
        algorithm = info.data.get("algorithm", "")  # missing if it was refused itself
        smallest = SMALLEST_VOCABULARY.get(algorithm, 0)
        if value < smallest:
            raise ValueError(f"a {algorithm} vocabulary needs at least {smallest} tokens")
        return value

    @model_validator(mode="after")
    def _pattern_is_read(self) -> TokenizerConfig:
        if self.pattern != "llama3" and self.algorithm != "bpe":
            raise ValueError(f"pattern: {self.pattern} is for algorithm: bpe, not {self.algorithm}")
        return self
