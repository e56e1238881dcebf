"""Pairs: a source that is read and a target that is to be written, each a text of its own.

The document of a pair is the source and the target, one after the other, with a mark where each begins. It is never
cut, neither for its length nor for a split.
"""

from __future__ import annotations

from typing import Final

KIND: Final = "pair"
SOURCE, TARGET = "source", "target"


def sides(text: str, marks: tuple[tuple[int, str], ...]) -> tuple[str, str] | None:
    """The source and the target in the text of a pair; None when its marks do not tell them apart."""
    if tuple(name for _, name in marks) != (SOURCE, TARGET):
        return None
    return text[: marks[1][0]], text[marks[1][0] :]
