"""Many texts as one array of bytes: which text a part of another is, and the order of all, without a loop over them.

A text's hash is that of Karp and Rabin 1987: a polynomial of its bytes, here modulo 2^64, so sums of all prefixes give
the hash of any part.
"""

from __future__ import annotations

from functools import cached_property
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
        return [data[begin:end].decode("utf-8") for begin, end in zip(places, places[1:], strict=False)]

    def hashes(self, begins: Places, ends: Places) -> Hashes:
        """The hash of each part of `text`, which does not depend on its place."""
        return (self._sums[ends] - self._sums[begins]) * self._inverses[begins]

    @cached_property
    def of_all(self) -> Hashes:
        """The hash of each text."""
        return self.hashes(self.starts[:-1], self.starts[1:])

    @cached_property
    def index(self) -> TextIndex:
        """Finds which text has a hash."""
        return TextIndex(self)

    def cuts(self) -> tuple[Places, Places]:
        """Every place inside a text where a character begins, in rising order, and the number of that text."""
        begins = (self.text & 0xC0) != 0x80
        begins[self.starts[:-1][self.lengths > 0]] = False
        places = np.flatnonzero(begins)
        return places, np.repeat(np.arange(len(self)), self.lengths)[places]

    def in_order(self) -> Places:
        """The numbers of all texts in the order of their bytes."""
        lengths = self.lengths
        padded = np.concatenate([self.text, np.zeros(_WORD, dtype=np.uint8)])
        words = np.ndarray((len(padded) - _WORD + 1,), dtype=">u8", buffer=padded, strides=(1,))
        shown = np.array([(2**64 - 1) << 8 * (_WORD - size) & (2**64 - 1) for size in range(_WORD + 1)], dtype=np.uint64)

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
        sums = np.zeros(len(self.text) + 1, dtype=np.uint64)
        np.cumsum((self.text.astype(np.uint64) + 1) * _powers(_BASE, len(self.text)), out=sums[1:])
        return sums

    @cached_property
    def _inverses(self) -> Hashes:
        return _powers(_INVERSE, len(self.text) + 1)


class TextIndex:
    """Finds which of some texts has a hash: a table with open addressing, for many hashes at once.

    `numbers` are those of the texts that can be found, by default all; `equal` is a pair of them with equal hashes, and
    so, but for hostile bytes, with equal texts; None if there is none.
    """

    def __init__(self, texts: Texts, numbers: Places | None = None) -> None:
        self._hashes, self._lengths = texts.of_all, texts.lengths
        numbers = np.arange(len(texts)) if numbers is None else numbers
        order = numbers[np.argsort(self._hashes[numbers], kind="stable")]
        twice = np.flatnonzero(self._hashes[order][1:] == self._hashes[order][:-1])
        self.equal = (int(order[twice[0]]), int(order[twice[0] + 1])) if len(twice) else None
        bits = max(4, (2 * len(numbers)).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._slots = np.full(1 << bits, -1, dtype=np.int64)
        place = self._home(self._hashes[numbers])
        while len(numbers):
            free = self._slots[place] < 0
            self._slots[place[free]] = numbers[free]
            left = self._slots[place] != numbers
            numbers, place = numbers[left], place[left] + 1 & self._mask

    def find(self, hashes: Hashes, lengths: Places) -> Places:
        """The number of the text with each hash and its number of bytes; -1 for none."""
        found = np.full(len(hashes), -1, dtype=np.int64)
        wanted, place = np.arange(len(hashes)), self._home(hashes)
        while len(wanted):
            here = self._slots[place]
            is_hit = (here >= 0) & (self._hashes[here] == hashes[wanted]) & (self._lengths[here] == lengths[wanted])
            found[wanted[is_hit]] = here[is_hit]
            goes_on = (here >= 0) & ~is_hit
            wanted, place = wanted[goes_on], place[goes_on] + 1 & self._mask
        return found

    def _home(self, hashes: Hashes) -> Places:
        return ((hashes ^ hashes >> np.uint64(32)) * np.uint64(_MIXING) >> self._shift).astype(np.int64)


def joined(texts: Texts, left: Places, right: Places, skipped: int = 0) -> tuple[Hashes, Places]:
    """The hash and the number of bytes of each text `left` with the text `right`, less its first bytes, behind it."""
    lengths, ends = texts.lengths, texts.starts[right + 1]
    begins = np.minimum(texts.starts[right] + skipped, ends)
    powers = _powers(_BASE, int(lengths.max(initial=0)) + 1)
    hashes = texts.of_all[left] + texts.hashes(begins, ends) * powers[lengths[left]]
    return hashes, lengths[left] + ends - begins


def _powers(base: int, count: int) -> Hashes:
    """The first powers of `base` modulo 2^64."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
