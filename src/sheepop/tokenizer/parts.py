"""Encodes byte-level BPE part by part, with a cache of the ids of parts.

Text is cut as by the tokenizer's pre-tokenizer. Natural text and code repeat their words, so most parts are in the
cache.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sheepop.tokenizer.pattern import Pattern

if TYPE_CHECKING:
    import tokenizers

# A small window, so that a non-ASCII character sends little text through the slower, general pattern.
_WINDOW = 2**10
# Where a part ends depends on at most this many characters after it. White space is the exception: its cut may depend
# on its last line end.
_LOOKAHEAD = 3
_ENTRIES = 2**18
_LONGEST_REMEMBERED = 64


class PartEncoder:
    """Encodes with the model of `backend` exactly like the library, and caches the ids of up to 2^18 parts.

    `backend` has no normalizer, its pre-tokenizer is that of `pattern`, and `part_text` returns the form of a part in
    its vocabulary. Safe to share between threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, pattern: Pattern, part_text: Callable[[str], str]) -> None:
        self._pre_tokenizer = backend.pre_tokenizer
        self._pattern = pattern
        self._ascii_parts = re.compile(pattern.ascii_regex).findall
        self._ids_of = _Memo(backend.model, part_text).__getitem__
        self._agreed: set[str] = set()

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """The token ids of `text`, or None if the library may classify one of its characters differently.

        These are lone surrogates, and characters that differ between Unicode versions.
        """
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

    def __init__(self, model: Any, part_text: Callable[[str], str]) -> None:
        super().__init__()
        self._model, self._part_text = model, part_text

    def __missing__(self, part: str) -> bytes:
        tokens = self._model.tokenize(self._part_text(part))
        ids = array("I", [token.id for token in tokens]).tobytes()
        if len(part) <= _LONGEST_REMEMBERED:
            if len(self) >= _ENTRIES:
                self.clear()
            self[part] = ids
        return ids
