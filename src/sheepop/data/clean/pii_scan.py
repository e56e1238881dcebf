"""Where in a text numbers that may be personal can stand at all, found by vectorised passes over its characters.

Nearly all text has few digits, so that the patterns that follow look at little of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BEFORE, _AFTER = 4, 8
_FEWEST_DIGITS = 4
_LONGEST_JOINT = 3

# In a short text, one pass that finds nothing is quicker than many that do: whatever is a candidate matches this.
_SHORT = 4096
_ANY = re.compile(
    rb"[0-9](?:(?:[ .\-/()?]{0,3}[0-9]){5}|[0-9]{0,2}(?:\.[0-9]{1,3}){3}|"
    rb"(?<=[A-Z]{2}[0-9])[0-9]|(?<=[23])[0-9A-Fa-f]{3}:)"
)

_NOT_DIGITS = bytes(code for code in range(256) if not 48 <= code <= 57)
# Between the digits of one number; the question mark stands for every character that is not ASCII, such as the
# narrow space of French typography.
_JOINT = np.zeros(256, dtype=bool)
_JOINT[np.frombuffer(b" .-/()?", dtype=np.uint8)] = True
_UPPER = np.zeros(256, dtype=bool)
_UPPER[65:91] = True
_WORD = _UPPER.copy()
_WORD[48:58] = _WORD[97:123] = _WORD[95] = True


class Run(NamedTuple):
    """Digits that may belong to one number: from the first to past the last, how many, and how many dots between."""

    start: int
    end: int
    digits: int
    dots: int


@dataclass
class Candidates:
    """Where to look: runs of digits, groups of digits that follow two capital letters, the beginnings of IPv6."""

    runs: list[Run] = field(default_factory=list)
    lettered: list[int] = field(default_factory=list)
    ipv6: list[int] = field(default_factory=list)


def find_candidates(text: str) -> Candidates:
    """The places in `text` that the patterns for numbers must look at."""
    plain = text.encode("ascii", "replace")
    if len(plain.translate(None, _NOT_DIGITS)) < _FEWEST_DIGITS:
        return Candidates()
    if len(plain) < _SHORT and not _ANY.search(plain):
        return Candidates()
    # Padding lets a few characters on either side of a digit be looked up without asking whether they exist.
    codes = np.frombuffer(b"".join((b"\n" * _BEFORE, plain, b"\n" * _AFTER)), dtype=np.uint8)
    is_digit = (codes - np.uint8(48)) < 10
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    groups = _Groups(codes, edges[0::2], edges[1::2])
    return Candidates(groups.runs(), groups.lettered(), groups.ipv6())


class _Groups:
    """The groups of digits in a text: where each starts and where it ends."""

    def __init__(self, codes: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self.codes, self.starts, self.ends = codes, starts, ends

    def runs(self) -> list[Run]:
        """Groups with nothing but joints between, where together they have digits enough for a number."""
        codes, starts, ends = self.codes, self.starts, self.ends
        linked, dotted = self._links()
        breaks = np.flatnonzero(~linked)
        first, last = np.append(0, breaks + 1), np.append(breaks, len(starts) - 1)
        start, end = starts[first], ends[last]
        count = np.add.reduceat(ends - starts, first)
        dots = np.add.reduceat(np.append(dotted, False), first, dtype=np.int64)
        is_decimal = (dots == 1) & (end - start == count + 1)
        letter = codes[end + (codes[end] == ord(" "))]
        keep = ((count >= 7) & ~is_decimal) | ((dots >= 3) & (count >= 4)) | ((count == 6) & _UPPER[letter])
        columns = (start - _BEFORE, end - _BEFORE, count, dots)
        return list(map(Run, *(column[keep].tolist() for column in columns)))

    def _links(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """For each group but the last, whether the next belongs to the same run, and whether it follows a dot."""
        gaps = self.starts[1:] - self.ends[:-1]
        linked = gaps <= _LONGEST_JOINT
        dotted = np.zeros(len(gaps), dtype=bool)
        near = np.flatnonzero(linked)
        position, gap = self.ends[near], gaps[near]
        between = self.codes[position]
        joined = _JOINT[between]
        for distance in range(1, _LONGEST_JOINT):
            joined &= (gap <= distance) | _JOINT[self.codes[position + distance]]
        linked[near] = joined
        dotted[near] = (gap == 1) & (between == ord("."))
        return linked, dotted

    def lettered(self) -> list[int]:
        """Where two digits or more follow two capital letters: tax codes and account numbers begin so."""
        codes, starts = self.codes, self.starts
        follows = _UPPER[codes[starts - 1]] & _UPPER[codes[starts - 2]] & (self.ends - starts >= 2)
        found: list[int] = (starts[follows] - _BEFORE).tolist()
        return found

    def ipv6(self) -> list[int]:
        """Where four characters from 2 or 3 on come before a colon: global unicast addresses begin so (RFC 4291)."""
        codes, starts = self.codes, self.starts
        begins = ((codes[starts] | 1) == ord("3")) & (codes[starts + 4] == ord(":")) & ~_WORD[codes[starts - 1]]
        found: list[int] = (starts[begins] - _BEFORE).tolist()
        return found
