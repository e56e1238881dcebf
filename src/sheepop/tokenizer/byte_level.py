"""Byte-level BPE: tokens are sequences of bytes, so every Unicode text has ids and comes back exactly.

Sennrich, Haddow and Birch 2016 (merges); Radford et al. 2019, section 2.2 (bytes as the alphabet).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer, surrogate_error
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.interface import SPECIAL_TOKENS, TOKENIZER_FILE, WHAT_IS_READ, standard_settings

# Text is cut into these parts before merging, and no token reaches over a cut:
#   a word with the one character before it (" word", "(self", "_name", ".append"),
#   at most three digits,
#   punctuation with the line end and indentation after it ("):\n        "),
#   a line end with the indentation after it,
#   other white space, of which the last character goes to the word behind it.
# No part holds an ASCII letter or digit before a space or line end, which `cut_text` relies on, and none holds
# both a letter and what stands behind it, so that no merge ever spells a special token.
PATTERN = "|".join(
    (
        r"[^\r\n\p{N}\p{L}\p{M}]?[\p{L}\p{M}]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{N}\p{L}\p{M}]+(?:[\r\n]+[ \t]*)?",
        r"[\r\n]+[ \t]*",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}

_CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")
_PART_CHARACTERS = 2**15

_SMALLEST = SMALLEST_VOCABULARY["bpe"]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a vocabulary: itself, or the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()

# 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8, and some vocabularies leave them out.
_UTF8_CHARACTERS = {c for c, byte in BYTE_ALPHABET.items() if byte not in {0xC0, 0xC1, *range(0xF5, 0x100)}}


class ByteLevelBPE(BackendTokenizer):
    """Byte-level BPE, trained here or read from a ``tokenizer.json`` such as GPT-2's.

    A tokenizer trained here gives back every Unicode text exactly and has ``<pad>``, ``<unk>``, ``<bos>``, ``<eos>``
    at the ids 0 to 3 and the 256 bytes at 4 to 259. A foreign one may rewrite the text first (Unicode
    normalisation), as its file says.
    """

    algorithm = "bpe"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> ByteLevelBPE:
        """Learns ``vocab_size - 260`` merges from `texts`, which are read once; the same texts give the same file.

        Raises `TokenizerError` when the texts have too few different parts for so many tokens.
        """
        if vocab_size < _SMALLEST:
            raise TokenizerError(
                f"A byte-level vocabulary has at least {_SMALLEST} tokens (4 special tokens and 256 bytes), got "
                f"vocab_size={vocab_size}."
            )
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=1,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_unicode_parts(texts), trainer)
        possible = backend.get_vocab_size(with_added_tokens=True)
        if possible < vocab_size:
            raise TokenizerError(
                f"The vocabulary is larger than the corpus allows: tokenizer.vocab_size is {vocab_size}, and this "
                f"text gives {possible} tokens at most. Set tokenizer.vocab_size={possible} or less, or add text."
            )
        return cls(backend.to_str(), standard_settings())

    def _check(self) -> None:
        model = self._description["model"]
        if model["type"] != "BPE" or not _is_byte_level(self._description["pre_tokenizer"]):
            raise TokenizerError(
                f"{TOKENIZER_FILE} holds a {model['type']} tokenizer that is not byte-level BPE. {WHAT_IS_READ}"
            )
        options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if unsupported := [name for name in options if model[name]]:
            raise TokenizerError(
                f"{TOKENIZER_FILE} sets {', '.join(unsupported)} of its BPE model, which SheepOp does not support. "
                "Use a byte-level BPE tokenizer without it."
            )
        if missing := _UTF8_CHARACTERS.difference(model["vocab"]):
            raise TokenizerError(
                f"The vocabulary of {TOKENIZER_FILE} lacks {len(missing)} of the bytes that UTF-8 text is made of "
                f"(0x{min(BYTE_ALPHABET[c] for c in missing):02X} first), so that text would be lost. The file is "
                "damaged, or was trained without its initial alphabet."
            )

    def _piece(self, text: str) -> bytes:
        try:
            return bytes(BYTE_ALPHABET[character] for character in text)
        except KeyError:  # An entry that was not made from bytes stands for its own text, as in the library.
            return text.encode("utf-8")

    def _cut(self, text: str) -> Iterator[str]:
        exact = self._description["pre_tokenizer"] == _PRE_TOKENIZER and self._description["normalizer"] is None
        plain = len(self._added) == len(SPECIAL_TOKENS) and self._special.keys() == set(SPECIAL_TOKENS.values())
        return cut_text(text) if exact and plain else iter((text,))


def cut_text(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts `text` into parts of about `characters` where `PATTERN` always cuts too, so that no id changes.

    A text without such a place (a letter or digit of ASCII before a space or line end) stays whole.
    """
    start = 0
    while len(text) - start > characters and (place := _CUT.search(text, start + characters)):
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def _unicode_parts(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if problem := surrogate_error((text,)):
            raise problem
        yield from cut_text(text)


def _is_byte_level(pre_tokenizer: Any) -> bool:
    steps = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    return any(step is not None and step["type"] == "ByteLevel" for step in steps)
