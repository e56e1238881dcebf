"""Splits words into tokens with the tables of a BPE model. Sennrich, Haddow and Birch 2016, algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

from sheepop.tokenizer.bpe_tables import BpeTables
from sheepop.tokenizer.vocabulary import BYTE_TOKENS


class BpeModel:
    """Splits words into tokens with `tables`, as the model of the library does; tokens in `hidden` are never found.

    `options` are those of the ``model`` in a ``tokenizer.json``.
    """

    def __init__(self, tables: BpeTables, options: Mapping[str, Any], hidden: frozenset[int]) -> None:
        self._tables, self._hidden = tables, hidden
        self._prefix = options["continuing_subword_prefix"] or ""
        self._whole_first, self._fuse = options["ignore_merges"], options["fuse_unk"]
        unknown = options["unk_token"]
        self._unknown = None if unknown is None else tables.id_of(unknown)
        found = [tables.id_of(token) for token in BYTE_TOKENS] if options["byte_fallback"] else []
        self._bytes = found or [None] * 256
        self._known: dict[str, int | None] = {}

    def tokenize(self, word: str) -> list[int]:
        """The ids of a word; what the vocabulary lacks becomes bytes, else the unknown token, else nothing."""
        if self._whole_first and (whole := self._id_of(word)) is not None:
            return [whole]
        return self._merge(self._characters(word))

    def _id_of(self, text: str) -> int | None:
        found = self._tables.id_of(text)
        return None if found in self._hidden else found

    def _characters(self, word: str) -> list[int]:
        ids: list[int] = []
        pending = False
        for place, character in enumerate(word):
            text = self._prefix + character if place else character
            if text not in self._known:
                self._known[text] = self._id_of(text)
            if (found := self._known[text]) is not None:
                if pending:
                    ids.append(self._unknown_id())
                ids.append(found)
                pending = False
                continue
            spelled = [self._bytes[byte] for byte in text.encode("utf-8")]
            if None not in spelled:
                ids += [token_id for token_id in spelled if token_id is not None]
            elif self._unknown is not None:
                if pending and not self._fuse:
                    ids.append(self._unknown)
                pending = True
        return [*ids, self._unknown_id()] if pending else ids

    def _unknown_id(self) -> int:
        assert self._unknown is not None
        return self._unknown

    def _merge(self, ids: list[int]) -> list[int]:
        """Merges neighbours, the pair of the lowest rank first, of equal ones the left one."""
        count = len(ids)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap: list[tuple[int, int, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            found = self._tables.pair(ids[left], ids[right])
            if found is not None and found[1] not in self._hidden:
                heappush(heap, (found[0], left, found[1], ids[left], ids[right]))

        for place in range(count - 1):
            consider(place, place + 1)
        while heap:
            _, left, whole, *pair = heappop(heap)
            right = after[left]
            if ids[left] < 0 or right >= count:
                continue
            if [ids[left], ids[right]] != pair:
                # A neighbour has changed meanwhile; the library goes by what the two become now.
                found = self._tables.pair(ids[left], ids[right])
                if found is None or found[1] != whole:
                    continue
            ids[left], ids[right] = whole, -1
            after[left] = after[right]
            if after[right] < count:
                before[after[right]] = left
                consider(left, after[left])
            if before[left] >= 0:
                consider(before[left], left)
        return [token_id for token_id in ids if token_id >= 0]
