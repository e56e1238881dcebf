"""Pre-tokenizers, which split text before merging: llama.cpp's names and their form in a ``tokenizer.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sheepop.tokenizer.pattern import LLAMA3, byte_level_step, split_bytes, without_offsets

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words_and_digits(digits: str) -> dict[str, Any]:
    """Returns the pre-tokenizer of cl100k and its descendants, which differ in how many digits stay together."""
    return split_bytes(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGITS_APART = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level_step(use_regex=True)],
}
_THREE_DIGITS, _ONE_DIGIT = _words_and_digits(r"\p{N}{1,3}"), _words_and_digits(r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer, whether parts that are tokens skip the merges, and llama.cpp's names for the combination.

    The first name is written, also for the pre-tokenizers in `same`, which llama.cpp does not distinguish from
    `description`. `add_bos` is llama.cpp's default.
    """

    names: tuple[str, ...]
    description: dict[str, Any]
    ignore_merges: bool = False
    add_bos: bool = False
    same: tuple[dict[str, Any], ...] = ()


_TABLE = (
    PreTokenizer(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), byte_level_step(use_regex=True)),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _THREE_DIGITS, ignore_merges=True, add_bos=True
    ),
    PreTokenizer(("smaug-bpe", "dbrx"), _THREE_DIGITS, same=(LLAMA3.pre_tokenizer,)),
    PreTokenizer(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open"), _ONE_DIGIT),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART),
    PreTokenizer(("bloom", "gpt3-finnish", "poro-chat"), split_bytes(r" ?[^(\s|[.,!?…。，、।۔،])]+")),
)
BY_NAME = {name: row for row in _TABLE for name in row.names}


def find_name(description: Any, ignore_merges: bool) -> str | None:
    """Returns llama.cpp's name for a pre-tokenizer, or None if it has none."""
    wanted = without_offsets(description)
    for row in _TABLE:
        if row.ignore_merges == ignore_merges and wanted in map(without_offsets, (row.description, *row.same)):
            return row.names[0]
    return None
