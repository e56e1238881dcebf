"""Applies the precompiled table of replacements in SentencePiece models as SentencePiece does.

The table is a double array (Aoe 1989, in the layout of the Darts-clone library): a trie over UTF-8 bytes, followed by
the replacements, each with a NUL at its end. The longest entry at each position counts. The library's own
``Precompiled`` normalizer takes the shortest entry in a whole grapheme and so loses the rest of the grapheme.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import SETTINGS_FILE, TOKENIZER_FILE

CHARSMAP_MATCHING = "charsmap_matching"
"""The key of ``tokenizer_config.json`` that selects this module; without it the library's normalizer is used."""

LONGEST = "longest"
_LARGEST_TABLE = 2**25
_LONGEST_ENTRY = 64
# Bit masks for the parts of a unit of the double array.
_LABEL, _VALUE, _ENDS_ENTRY = 0x800000FF, 0x7FFFFFFF, 0x100


class Charsmap:
    """The replacements in `table`; raises `TokenizerError` if it is damaged. Safe to share between threads."""

    def __init__(self, table: bytes) -> None:
        if not 8 <= len(table) <= _LARGEST_TABLE:
            raise _damaged(f"it has {len(table):,} bytes")
        size = struct.unpack_from("<I", table)[0]
        if size % 4 or not 4 <= size <= len(table) - 4:
            raise _damaged(f"its trie claims {size:,} of {len(table):,} bytes")
        self._units: list[int] = np.frombuffer(table, dtype="<u4", count=size // 4, offset=4).tolist()
        self._replacements = table[4 + size :]
        # The characters seen so far, and a pattern of those that may begin an entry.
        self._seen: tuple[frozenset[str], _Beginnings] = (frozenset(), _Beginnings())

    def rewrite(self, text: str) -> str:
        """`text` with every entry of the table replaced, from left to right, the longest at each position."""
        pattern = self._beginnings(text)
        pieces: list[str] = []
        copied = place = 0
        while found := pattern.search(text, place):
            start = found.start()
            length, replacement = self._longest(text, start)
            place = start + length
            if replacement is not None:
                pieces += (text[copied:start], replacement)
                copied = place
        return "".join((*pieces, text[copied:]))

    def _beginnings(self, text: str) -> re.Pattern[str]:
        known, beginnings = self._seen
        if new := set(text) - known:
            alone = {character for character in new if self._ends_or_goes_on_in_ascii(character)}
            others = {character for character in new - alone if self._below(0, character) is not None}
            if alone or others:
                beginnings = _Beginnings(beginnings.alone | alone, beginnings.others | others)
            self._seen = known | new, beginnings
        return beginnings.pattern

    def _ends_or_goes_on_in_ascii(self, character: str) -> bool:
        node = self._below(0, character)
        if node is None:
            return False
        return bool(self._units[node] & _ENDS_ENTRY) or any(self._child(node, byte) for byte in range(1, 0x80))

    def _longest(self, text: str, start: int) -> tuple[int, str | None]:
        """The length of the longest entry at `start` in characters, and its replacement; 1 and None if none."""
        best: tuple[int, str | None] = (1, None)
        node = 0
        for place in range(start, min(start + _LONGEST_ENTRY, len(text))):
            below = self._below(node, text[place])
            if below is None:
                break
            node = below
            if self._units[node] & _ENDS_ENTRY:
                best = place + 1 - start, self._replacement(node)
        return best

    def _below(self, node: int, character: str) -> int | None:
        """The node that `node` leads to by the bytes of a character, or None."""
        for byte in character.encode("utf-8"):
            child = self._child(node, byte)
            if child is None:
                return None
            node = child
        return node

    def _child(self, node: int, byte: int) -> int | None:
        child = node ^ _offset(self._units[node]) ^ byte
        return child if 0 < child < len(self._units) and self._units[child] & _LABEL == byte else None

    def _replacement(self, node: int) -> str:
        place = node ^ _offset(self._units[node])
        start = self._units[place] & _VALUE if place < len(self._units) else len(self._replacements)
        stop = self._replacements.find(b"\0", start)
        if stop < 0:
            raise _damaged("a replacement lies outside it")
        try:
            return self._replacements[start:stop].decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged("a replacement is not UTF-8 text") from None


def charsmap_of(description: Mapping[str, Any], matching: str) -> tuple[dict[str, Any], Charsmap]:
    """Splits `description` into the rest and its table; raises `TokenizerError` unless that is the first step."""
    if matching != LONGEST:
        raise TokenizerError(f"{SETTINGS_FILE}: {CHARSMAP_MATCHING} = {matching!r} must be {LONGEST!r}.")
    normalizer = description["normalizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if not steps or steps[0]["type"] != "Precompiled" or any(step["type"] == "Precompiled" for step in steps[1:]):
        raise TokenizerError(
            f"{SETTINGS_FILE} says {CHARSMAP_MATCHING}, but the first step of the normalizer in {TOKENIZER_FILE} is "
            "not a table of replacements. Use the two files of the same tokenizer."
        )
    rest = {"type": "Sequence", "normalizers": steps[1:]} if steps[1:] else None
    return {**description, "normalizer": rest}, Charsmap(base64.b64decode(steps[0]["precompiled_charsmap"]))


class _Beginnings:
    """Characters that may begin an entry: `alone` anywhere, `others` only before a non-ASCII character."""

    def __init__(self, alone: frozenset[str] = frozenset(), others: frozenset[str] = frozenset()) -> None:
        self.alone, self.others = alone, others
        self.pattern = re.compile(rf"{_any_of(alone)}|{_any_of(others)}(?=[^\x00-\x7f])")


def _any_of(characters: frozenset[str]) -> str:
    """A class of at least these characters; it has all or none above U+FFFF, where the search would be slow."""
    near = "".join(sorted(character for character in characters if character <= "\uffff"))
    far = "\U00010000-\U0010ffff" if len(near) < len(characters) else ""
    return f"[{re.escape(near)}{far}]" if characters else "(?!)"


def _offset(unit: int) -> int:
    """The offset of a unit's children, to combine by exclusive or."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _damaged(reason: str) -> TokenizerError:
    return TokenizerError(f"The table of replacements (precompiled_charsmap) is damaged: {reason}.")
