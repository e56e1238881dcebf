"""The precompiled table of replacements in SentencePiece models, applied as SentencePiece applies it.

The table is a double array (Aoe 1989, in the layout of the Darts-clone library): a trie over UTF-8 bytes, and after it
the replacements, ended by NUL. At every place of a text the longest entry counts. The library's own ``Precompiled``
normalizer looks at a whole grapheme and takes its shortest entry, by which it loses what follows in the grapheme.
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
"""The key of ``tokenizer_config.json`` that asks for this; without it the library's normalizer is meant."""

LONGEST = "longest"
_LARGEST_TABLE = 2**25
_LONGEST_ENTRY = 64
# The parts of a unit of the double array.
_LABEL, _VALUE, _ENDS_ENTRY = 0x800000FF, 0x7FFFFFFF, 0x100


class Charsmap:
    """Replacements for pieces of text, read from `table`; raises `TokenizerError` when it is damaged.

    Safe to share between threads.
    """

    def __init__(self, table: bytes) -> None:
        if not 8 <= len(table) <= _LARGEST_TABLE:
            raise _damaged(f"it has {len(table):,} bytes")
        size = struct.unpack_from("<I", table)[0]
        if size % 4 or not 4 <= size <= len(table) - 4:
            raise _damaged(f"its trie claims {size:,} of {len(table):,} bytes")
        self._units: list[int] = np.frombuffer(table, dtype="<u4", count=size // 4, offset=4).tolist()
        self._replacements = table[4 + size :]
        # The characters seen so far, and a pattern of those among them with which an entry may begin.
        self._seen: tuple[frozenset[str], _Beginnings] = (frozenset(), _Beginnings())

    def rewrite(self, text: str) -> str:
        """`text` with every entry of the table replaced, the longest at each place, from left to right."""
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
        """How many characters the longest entry at `start` has, and what replaces it; 1 and None without an entry."""
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
        """The node that the bytes of a character lead to from `node`, None when no entry goes on with them."""
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
    """`description` without its table of replacements, and that table, for a tokenizer whose settings say `matching`.

    Raises `TokenizerError` where the table does not come before every other change to the text.
    """
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
    """Characters with which an entry begins: `alone` wherever they stand, `others` only before one beyond ASCII."""

    def __init__(self, alone: frozenset[str] = frozenset(), others: frozenset[str] = frozenset()) -> None:
        self.alone, self.others = alone, others
        self.pattern = re.compile(rf"{_any_of(alone)}|{_any_of(others)}(?=[^\x00-\x7f])")


def _any_of(characters: frozenset[str]) -> str:
    """A class of at least these characters. Beyond U+FFFF it has all, since it would be searched one by one there."""
    near = "".join(sorted(character for character in characters if character <= "\uffff"))
    far = "\U00010000-\U0010ffff" if len(near) < len(characters) else ""
    return f"[{re.escape(near)}{far}]" if characters else "(?!)"


def _offset(unit: int) -> int:
    """How far the children of a unit lie from it, by exclusive or."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _damaged(reason: str) -> TokenizerError:
    return TokenizerError(f"The table of replacements (precompiled_charsmap) is damaged: {reason}.")
