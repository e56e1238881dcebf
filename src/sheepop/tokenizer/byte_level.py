"""Byte-level BPE: tokens are sequences of bytes, so every Unicode text can be encoded and decoded exactly.

Sennrich, Haddow and Birch 2016 (merges); Radford et al. 2019, section 2.2 (bytes as the alphabet).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.facts import plural
from sheepop.tokenizer.bpe import BpeTokenizer
from sheepop.tokenizer.byte_level_files import byte_level_json
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.decoding import Decoding
from sheepop.tokenizer.encoder import parse
from sheepop.tokenizer.interface import SPECIAL_TOKENS, TOKENIZER_FILE
from sheepop.tokenizer.pattern import PATTERNS, Pattern, cut_text, find_pattern, surrogate_error, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, standard_settings
from sheepop.tokenizer.vocabulary import (
    BYTE_ALPHABET,
    bytes_as_characters,
    characters_as_bytes,
    check_options,
    require_size,
)

# A small window, so that a non-ASCII character sends little text through the slower, general pattern.
_WINDOW = 2**10
# Where a part ends depends on at most this many characters after it. White space is the exception: its cut may depend
# on its last line end.
_LOOKAHEAD = 3
_ENTRIES = 2**18
_LONGEST_REMEMBERED = 64
# A longer part is left to the library's threads, which do not hold Python's lock.
_LONGEST_PART = 2**12
_BLOCK = 2**16


class PartEncoder:
    """Encodes with `tokenize` exactly like the library, and caches the ids of up to 2^18 parts.

    The text is not normalized, and the library's `pre_tokenizer` is that of `pattern`. Safe to share between threads.
    """

    def __init__(self, pre_tokenizer: Any, tokenize: Callable[[str], Sequence[int]], pattern: Pattern) -> None:
        self._pre_tokenizer = pre_tokenizer
        self._pattern = pattern
        self._ascii_parts = re.compile(pattern.ascii_regex).findall
        self._ids_of = _Memo(tokenize).__getitem__
        self._agreed: set[str] = set()

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """The token ids of `text`; None for surrogates, characters that differ between Unicode versions, long parts."""
        blocks = []
        start, size = 0, _WINDOW
        while start < len(text):
            window = text[start : start + size]
            parts = self._parts(window)
            if parts is None:
                return None
            held_back = 0
            if start + size < len(text):
                while parts and (held_back < _LOOKAHEAD or parts[-1].isspace()):
                    held_back += len(parts.pop())
                if not parts:
                    size *= 2
                    if size > _LONGEST_PART:
                        return None
                    continue
            blocks.append(b"".join(map(self._ids_of, parts)))
            start += len(window) - held_back
            size = _WINDOW
        return np.frombuffer(b"".join(blocks), dtype=np.uint32)

    def _parts(self, window: str) -> list[str] | None:
        if window.isascii():
            return self._ascii_parts(window)
        unknown = set(window) - self._agreed
        if not all(map(self._is_same_class, unknown)):
            return None
        self._agreed |= unknown
        return self._general_parts(window)

    @cached_property
    def _general_parts(self) -> Callable[[str], list[str]]:
        import regex  # type: ignore[import-untyped, unused-ignore]

        findall: Callable[[str], list[str]] = regex.compile(self._pattern.regex).findall
        return findall

    def _is_same_class(self, character: str) -> bool:
        """Whether library and pattern cut equally between `character` and a letter, a digit and a sign before it.

        The three together distinguish letters, numbers, white space and everything else.
        """
        if "\ud800" <= character <= "\udfff":
            return False
        for neighbour in "a1!":
            probe = neighbour + character
            theirs = [probe[start:stop] for _, (start, stop) in self._pre_tokenizer.pre_tokenize_str(probe)]
            if theirs != self._general_parts(probe):
                return False
        return True


class _Memo(dict[str, bytes]):
    """A cache from parts to their ids, as the bytes of 32-bit numbers; it is emptied when it is full."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._tokenize = tokenize

    def __missing__(self, part: str) -> bytes:
        ids = array("I", self._tokenize(bytes_as_characters(part.encode("utf-8")))).tobytes()
        if len(part) <= _LONGEST_REMEMBERED:
            if len(self) >= _ENTRIES:
                self.clear()
            self[part] = ids
        return ids


# 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8, and some vocabularies lack them. 0xF1 and 0xF2 begin the planes 4 to
# 11, in which Unicode has assigned no character. The training text of some vocabularies had none of these either, nor
# control characters other than tabs and line ends (Falcon's).
_ABSENT = {0xC0, 0xC1, *range(0xF5, 0x100)}
_CONTROL = {byte: re.escape(chr(byte)) for byte in (*range(0x20), 0x7F) if byte not in b"\t\n\r"}
_RARE = {**_CONTROL, 0xF1: "\U00040000-\U0007ffff", 0xF2: "\U00080000-\U000bffff"}


class ByteLevelBPE(BpeTokenizer):
    """Byte-level BPE, trained here or read from a ``tokenizer.json`` such as GPT-2's.

    A tokenizer trained here decodes every Unicode text exactly and has ``<pad>``, ``<unk>``, ``<bos>``, ``<eos>`` at
    the ids 0 to 3, the 256 bytes at 4 to 259, and further special tokens at the last ids. The file of another one may
    specify that text is normalized first.
    """

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, pattern: str = "llama3"
    ) -> ByteLevelBPE:
        """Learns merges from `texts`, which are read once; the same texts give the same file.

        There are ``vocab_size - 260 - len(special_tokens)`` merges; the further `special_tokens` get the last ids.
        `pattern` names the entry of `PATTERNS` that cuts the text. Raises `TokenizerError` if the texts have too few
        different parts for this many tokens.
        """
        smallest = SMALLEST_VOCABULARY["bpe"] + len(special_tokens)
        if vocab_size < smallest:
            raise TokenizerError(
                f"A byte-level vocabulary needs at least {smallest} tokens "
                f"({len(SPECIAL_TOKENS) + len(special_tokens)} special tokens and 256 bytes), got "
                f"vocab_size={vocab_size}."
            )
        from tokenizers import AddedToken, decoders, pre_tokenizers, trainers

        backend = parse(byte_level_json({}, [], PATTERNS[pattern].pre_tokenizer, [], {}))
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special_tokens),
            min_frequency=1,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((part for text in unicode_texts(texts) for part in cut_text(text)), trainer)
        first = backend.get_vocab_size(with_added_tokens=True)
        further = further_special_tokens(special_tokens, backend.get_vocab())
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in further])
        require_size(backend.get_vocab_size(with_added_tokens=True), vocab_size)
        return cls(backend.to_str(), standard_settings({text: first + place for place, text in enumerate(further)}))

    def _check(self) -> None:
        check_options(self._description["model"], "continuing_subword_prefix", "end_of_word_suffix")
        lacking = sorted(byte for c, byte in BYTE_ALPHABET.items() if byte not in _ABSENT and c not in self._tables)
        if any(byte not in _RARE for byte in lacking):
            raise TokenizerError(
                f"The vocabulary of {TOKENIZER_FILE} lacks {len(lacking)} of the bytes that UTF-8 text is made of "
                f"(0x{lacking[0]:02X} first), so text would be lost. The file is damaged, or was trained without its "
                "initial alphabet."
            )
        if lacking:
            named = ", ".join(f"0x{byte:02X}" for byte in lacking)
            self.notes += (
                f"The vocabulary lacks the {plural(len(lacking), 'byte')} {named}, needed only by control characters "
                "or by characters that Unicode has not assigned; text with one of them is refused.",
            )
            self._unwritable = re.compile(f"[{''.join(_RARE[byte] for byte in lacking)}]")

    _unwritable: re.Pattern[str] | None = None

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order; part by part in this thread if that gives the same ids as the library."""
        texts, encoder = list(texts), self._part_encoder
        self._require_writable(texts)
        if encoder is None:
            return super().encode_batch(texts, allow_special=allow_special)
        # The library finds added tokens that are not special even if special tokens are not allowed.
        cut_out = [text for text in self._added.values() if allow_special or text not in self._special]
        results: list[list[int]] = []
        left_over: list[int] = []
        for index, text in enumerate(texts):
            whole = isinstance(text, str) and not any(token in text for token in cut_out)
            ids = encoder.encode(text) if whole else None
            results.append([] if ids is None else _as_list(ids))
            if ids is None:
                left_over.append(index)
        if left_over:
            if all(isinstance(text, str) for text in texts) and (problem := surrogate_error(texts)):
                raise problem
            encoded = super().encode_batch([texts[index] for index in left_over], allow_special=allow_special)
            for index, found in zip(left_over, encoded, strict=True):
                results[index] = found
        return results

    def _require_writable(self, texts: Sequence[str]) -> None:
        if self._unwritable is None:
            return
        for number, text in enumerate(texts, start=1):
            if isinstance(text, str) and (found := self._unwritable.search(text)):
                raise TokenizerError(
                    f"Text {number} of {len(texts)} has the character U+{ord(found[0]):04X} at place "
                    f"{found.start()}, which this vocabulary cannot express. Remove it."
                )

    @cached_property
    def _part_encoder(self) -> PartEncoder | None:
        """The encoder by parts; None if text is normalized first or cut by an unknown pattern."""
        if self._description["normalizer"] is not None:
            return None
        pattern = find_pattern(self._description["pre_tokenizer"])
        if pattern is None:
            return None
        pre_tokenizer = self._steps(self._description).pre_tokenizer
        return PartEncoder(pre_tokenizer, self.tokenize_word, pattern)

    def _read_decoding(self) -> Decoding:
        return Decoding((characters_as_bytes,), 0)


def _as_list(ids: NDArray[np.uint32]) -> list[int]:
    """The numbers in turns, so that other threads run between them."""
    found: list[int] = []
    for start in range(0, len(ids), _BLOCK):
        found += ids[start : start + _BLOCK].tolist()
    return found


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether the pre-tokenizer of a ``tokenizer.json`` works on bytes."""
    pre_tokenizer = description.get("pre_tokenizer")
    if not isinstance(pre_tokenizer, dict):
        return False
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return isinstance(steps, list) and any(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)
