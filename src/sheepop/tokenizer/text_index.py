"""Many texts as one array of bytes: which text a part of another is, and the order of all, without a loop over them.

A text's hash is that of Karp and Rabin 1987: a polynomial of its bytes, here modulo 2^64, so sums of all prefixes give
the hash of any part.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = NDArray[np.int64]
"""Places in an array of bytes, or ids."""
Hashes: TypeAlias = NDArray[np.uint64]

# Odd, so that it has an inverse modulo 2^64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_MIXING = 0xFF51AFD7ED558CCD  # without a relation to the base, so that texts which differ little lie apart
_BLOCK = 2**14  # bytes that are summed at a time
_WORD = 8  # bytes that are compared at a time


class Texts:
    """`text` (n,) uint8 has the bytes of all texts, one after the other; text i is ``text[starts[i] : starts[i + 1]]``.

    `starts` has one place more than there are texts.
    """

    def __init__(self, text: NDArray[np.uint8], starts: NDArray[Any]) -> None:
        self.text, self.starts = text, starts.astype(np.int64)

    @classmethod
    def of(cls, encoded: list[bytes]) -> Texts:
        """The texts with these bytes."""
        starts = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)), out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> str:
        return self.text[self.starts[number] : self.starts[number + 1]].tobytes().decode("utf-8")

    @property
    def lengths(self) -> Places:
        """The number of bytes of each."""
        return np.diff(self.starts)

    def first(self, count: int) -> Texts:
        """The first `count` texts."""
        return Texts(self.text[: self.starts[count]], self.starts[: count + 1])

    def decoded(self) -> list[str]:
        """All of them."""
        data, places = self.text.tobytes(), self.starts.tolist()
        return [data[begin:end].decode("utf-8") for begin, end in pairwise(places)]

    def hashes(self, begins: Places, ends: Places) -> Hashes:
        """The hash of each part of `text`, which does not depend on its place."""
        shift = _powers(_INVERSE, _BLOCK)[begins % _BLOCK]
        shift *= _powers(pow(_INVERSE, _BLOCK, 2**64), len(self.text) // _BLOCK + 1)[begins // _BLOCK]
        return (self._sums[ends] - self._sums[begins]) * shift

    @cached_property
    def of_all(self) -> Hashes:
        """The hash of each text."""
        return self.hashes(self.starts[:-1], self.starts[1:])

    @cached_property
    def index(self) -> TextIndex:
        """Finds which text has a hash."""
        return TextIndex(self)

    def cuts(self, first: int, last: int) -> tuple[Places, Places]:
        """Every place inside the texts from `first` to before `last` where a character begins, and their numbers."""
        starts, lengths = self.starts[first : last + 1], self.lengths[first:last]
        begins = (self.text[starts[0] : starts[-1]] & 0xC0) != 0x80
        begins[(starts[:-1] - starts[0])[lengths > 0]] = False
        places = np.flatnonzero(begins)
        return places + starts[0], np.repeat(np.arange(first, last), lengths)[places]

    def in_order(self) -> Places:
        """The numbers of all texts in the order of their bytes."""
        lengths = self.lengths
        padded = np.concatenate([self.text, np.zeros(_WORD, dtype=np.uint8)])
        words = np.ndarray((len(padded) - _WORD + 1,), dtype=">u8", buffer=padded, strides=(1,))
        shown = np.array(
            [(2**64 - 1) << 8 * (_WORD - size) & (2**64 - 1) for size in range(_WORD + 1)], dtype=np.uint64
        )

        def word(of: Places, number: int) -> Hashes:
            """Bytes of some texts as one integer, zeros behind their ends."""
            left = np.clip(lengths[of] - number * _WORD, 0, _WORD)
            places = np.minimum(self.starts[of] + number * _WORD, len(self.text))
            return words[places].astype(np.uint64) & shown[left]

        order = np.arange(len(self))
        groups = np.zeros(len(self), dtype=np.int64)  # of texts that are equal so far
        open_ones, number = np.arange(len(self)), 0
        while len(open_ones):
            some = order[open_ones]
            found = word(some, number)
            sorting = np.lexsort((lengths[some], found, groups[open_ones]))
            order[open_ones], found = some[sorting], found[sorting]
            of_group = groups[open_ones]
            is_new = np.append(True, (found[1:] != found[:-1]) | (of_group[1:] != of_group[:-1]))
            groups[open_ones] = open_ones[np.maximum.accumulate(np.where(is_new, np.arange(len(is_new)), 0))]
            number += 1
            shared = ~(is_new & np.append(is_new[1:], True))
            # Among texts that have ended, the shorter one is already the first.
            open_ones = open_ones[shared]
            longest = np.zeros(len(self), dtype=np.int64)
            np.maximum.at(longest, groups[open_ones], lengths[order[open_ones]])
            open_ones = open_ones[longest[groups[open_ones]] > number * _WORD]
        return order

    @cached_property
    def _sums(self) -> Hashes:
        """The polynomial of all bytes before each place."""
        sums, powers, factor = np.zeros(len(self.text) + 1, dtype=np.uint64), _powers(_BASE, _BLOCK), 1
        for begin in range(0, len(self.text), _BLOCK):
            part = self.text[begin : begin + _BLOCK].astype(np.uint64) + 1
            here = sums[begin + 1 : begin + 1 + len(part)]
            np.cumsum(part * powers[: len(part)], out=here)
            here *= np.uint64(factor)
            here += sums[begin]
            factor = factor * pow(_BASE, _BLOCK, 2**64) % 2**64
        return sums


class TextIndex:
    """Finds which of some texts has a hash: a table with open addressing, for many hashes at once.

    `numbers` are those of the texts that can be found, by default all; `equal` is a pair of them with equal hashes, and
    so, but for hostile bytes, with equal texts; None if there is none. Texts without bytes are not found.
    """

    def __init__(self, texts: Texts, numbers: Places | None = None) -> None:
        numbers = np.flatnonzero(texts.lengths) if numbers is None else numbers
        hashes = texts.of_all[numbers]
        in_order = np.sort(hashes)
        twice = in_order[1:][in_order[1:] == in_order[:-1]]
        self.equal = tuple(numbers[hashes == twice[0]][:2].tolist()) if len(twice) else None
        bits = max(4, (2 * len(numbers)).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._hashes, self._numbers = np.zeros(1 << bits, dtype=np.uint64), np.full(1 << bits, -1, dtype=np.int32)
        place = self._home(hashes)
        while len(numbers):
            free = self._hashes[place] == 0
            self._hashes[place[free]], self._numbers[place[free]] = hashes[free], numbers[free]
            left = self._hashes[place] != hashes
            numbers, hashes, place = numbers[left], hashes[left], place[left] + 1 & self._mask

    def find(self, hashes: Hashes) -> Places:
        """The number of the text with each hash; -1 for none."""
        place = self._home(hashes)
        here = self._hashes[place]
        found = np.where(here == hashes, self._numbers[place], -1).astype(np.int64)
        others = np.flatnonzero((here != hashes) & (here != 0))
        place = place[others]
        while len(others):
            place = place + 1 & self._mask
            here = self._hashes[place]
            is_hit = here == hashes[others]
            found[others[is_hit]] = self._numbers[place[is_hit]]
            goes_on = ~is_hit & (here != 0)
            others, place = others[goes_on], place[goes_on]
        return found

    def _home(self, hashes: Hashes) -> Places:
        return ((hashes ^ hashes >> np.uint64(32)) * np.uint64(_MIXING) >> self._shift).astype(np.int64)


def joined(texts: Texts, left: Places, right: Places, skipped: int = 0) -> Hashes:
    """The hash of each text `left` with the text `right`, less its first bytes, behind it."""
    ends = texts.starts[right + 1]
    behind = texts.hashes(np.minimum(texts.starts[right] + skipped, ends), ends)
    powers = _powers(_BASE, int(texts.lengths.max(initial=0)) + 1)
    return texts.of_all[left] + behind * powers[texts.lengths[left]]


@lru_cache(maxsize=8)
def _powers(base: int, count: int) -> Hashes:
    """The first powers of `base` modulo 2^64, not to be changed."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
