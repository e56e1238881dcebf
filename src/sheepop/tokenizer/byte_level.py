"""Byte-level BPE: tokens are sequences of bytes, so every Unicode text has ids and comes back exactly.

Sennrich, Haddow and Birch 2016 (merges); Radford et al. 2019, section 2.2 (bytes as the alphabet).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer, surrogate_error
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.interface import SPECIAL_TOKENS, TOKENIZER_FILE, WHAT_IS_READ, standard_settings
from sheepop.tokenizer.parts import KnownPattern, PartEncoder

if TYPE_CHECKING:
    import tokenizers

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

# The same parts where text is ASCII: white space is TAB to CR and the space.
_ASCII_PATTERN = "|".join(
    (
        r"[^\r\n0-9A-Za-z]?[A-Za-z]+",
        r"[0-9]{1,3}",
        r" ?[^0-9A-Za-z\t-\r ]+(?:[\r\n]+[ \t]*)?",
        r"[\r\n]+[ \t]*",
        r"[\t-\r ]+(?![^\t-\r ])",
        r"[\t-\r ]+",
    )
)

_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}

# The pattern of GPT-2 (Radford et al. 2019), which the library has built in.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_ASCII_PATTERN = "|".join(
    (
        r"'(?:[stmd]|re|ve|ll)",
        r" ?[A-Za-z]+",
        r" ?[0-9]+",
        r" ?[^0-9A-Za-z\t-\r ]+",
        r"[\t-\r ]+(?![^\t-\r ])",
        r"[\t-\r ]+",
    )
)
_GPT2_PRE_TOKENIZER = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}

_KNOWN_PATTERNS = (
    KnownPattern(_PRE_TOKENIZER, PATTERN, _ASCII_PATTERN),
    # Offsets play no part in ids.
    *(
        KnownPattern({**_GPT2_PRE_TOKENIZER, "trim_offsets": trim}, _GPT2_PATTERN, _GPT2_ASCII_PATTERN)
        for trim in (False, True)
    ),
)

_CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")
_PART_CHARACTERS = 2**15

_SMALLEST = SMALLEST_VOCABULARY["bpe"]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a vocabulary: itself, or the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_ALPHABET.items()}

# 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8, and some vocabularies leave them out.
_UTF8_CHARACTERS = {c for c, byte in BYTE_ALPHABET.items() if byte not in {0xC0, 0xC1, *range(0xF5, 0x100)}}


class ByteLevelBPE(BackendTokenizer):
    """Byte-level BPE, trained here or read from a ``tokenizer.json`` such as GPT-2's.

    A tokenizer trained here gives back every Unicode text exactly and has ``<pad>``, ``<unk>``, ``<bos>``, ``<eos>``
    at the ids 0 to 3, the 256 bytes at 4 to 259, and what other special tokens it was given at the last ids. A
    foreign one may rewrite the text first (Unicode normalisation), as its file says.
    """

    algorithm = "bpe"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> ByteLevelBPE:
        """Learns merges from `texts`, which are read once; the same texts give the same file.

        There are ``vocab_size - 260`` merges, less one for each of `special_tokens`: further special tokens, which
        take the last ids. Raises `TokenizerError` when the texts have too few different parts for so many tokens.
        """
        smallest = _SMALLEST + len(special_tokens)
        if vocab_size < smallest:
            raise TokenizerError(
                f"A byte-level vocabulary has at least {smallest} tokens ({len(SPECIAL_TOKENS) + len(special_tokens)} "
                f"special tokens and 256 bytes), got vocab_size={vocab_size}."
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
            vocab_size=vocab_size - len(special_tokens),
            min_frequency=1,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_unicode_parts(texts), trainer)
        further = _add_special_tokens(backend, special_tokens)
        possible = backend.get_vocab_size(with_added_tokens=True)
        if possible < vocab_size:
            raise TokenizerError(
                f"The vocabulary is larger than the corpus allows: tokenizer.vocab_size is {vocab_size}, and this "
                f"text gives {possible} tokens at most. Set tokenizer.vocab_size={possible} or less, or add text."
            )
        return cls(backend.to_str(), standard_settings(further))

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

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order: in this thread, part by part, where that is known to give the same ids."""
        encoder = self._part_encoder
        if encoder is None:
            return super().encode_batch(texts, allow_special=allow_special)
        texts = list(texts)
        cut_out = list(self._added.values()) if allow_special else self._ordinary_added
        results: list[list[int]] = []
        left_over: list[int] = []
        for index, text in enumerate(texts):
            whole = isinstance(text, str) and not any(token in text for token in cut_out)
            ids = encoder.encode(text) if whole else None
            results.append([] if ids is None else ids.tolist())
            if ids is None:
                left_over.append(index)
        if left_over:
            self._encode_by_library(texts, left_over, results, allow_special)
        return results

    def _encode_by_library(
        self, texts: list[str], indices: list[int], results: list[list[int]], allow_special: bool
    ) -> None:
        if all(isinstance(text, str) for text in texts) and (problem := surrogate_error(texts)):
            raise problem
        encoded = super().encode_batch([texts[index] for index in indices], allow_special=allow_special)
        for index, ids in zip(indices, encoded, strict=True):
            results[index] = ids

    @cached_property
    def _part_encoder(self) -> PartEncoder | None:
        """None where text is rewritten first, or cut by a pattern that is not known here."""
        description = self._description
        if description["normalizer"] is not None:
            return None
        for known in _KNOWN_PATTERNS:
            if description["pre_tokenizer"] == known.pre_tokenizer:
                return PartEncoder(self._ordinary, known, _vocabulary_text)
        return None

    @cached_property
    def _ordinary_added(self) -> list[str]:
        """Added tokens that the library finds in any text, also where special ones are taken as ordinary text."""
        return [text for text in self._added.values() if text not in self._special]

    def _piece(self, text: str) -> bytes:
        try:
            return bytes(BYTE_ALPHABET[character] for character in text)
        except KeyError:  # An entry that was not made from bytes stands for its own text, as in the library.
            return text.encode("utf-8")

    def _cut(self, text: str) -> Iterator[str]:
        exact = self._description["pre_tokenizer"] == _PRE_TOKENIZER and self._description["normalizer"] is None
        return cut_text(text) if exact and self._added_are_whole else iter((text,))

    @cached_property
    def _added_are_whole(self) -> bool:
        """Whether no cut of `cut_text` falls inside an added token, or beside one that looks at its surroundings."""
        tokens = self._description["added_tokens"]
        looks = ("single_word", "lstrip", "rstrip")
        return not any(any(token[flag] for flag in looks) or _CUT.search(token["content"]) for token in tokens)


def cut_text(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts `text` into parts of about `characters` where `PATTERN` always cuts too, so that no id changes.

    A text without such a place (a letter or digit of ASCII before a space or line end) stays whole.
    """
    start = 0
    while len(text) - start > characters and (place := _CUT.search(text, start + characters)):
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def _add_special_tokens(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> dict[str, int]:
    """Adds special tokens after all others; returns their ids."""
    from tokenizers import AddedToken

    first = backend.get_vocab_size(with_added_tokens=True)
    for text in texts:
        if backend.token_to_id(text) is not None:
            raise TokenizerError(f"The special token {text!r} is part of ordinary text. Choose a name that is not.")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return {text: first + index for index, text in enumerate(texts)}


def _vocabulary_text(part: str) -> str:
    """The characters that stand for the bytes of `part` in a vocabulary."""
    return part.encode("utf-8").decode("latin-1").translate(_CHARACTER_OF_BYTE)


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
