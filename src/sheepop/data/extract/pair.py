"""Pairs in records: a source that is read and a target that is to be written, each a text of its own.

The document of a pair is the source and the target, one after the other, with a mark where each begins. It is never
cut, neither for its length nor for a split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sheepop.data.extract.interface import ExtractionError

KIND: Final = "pair"
SOURCE, TARGET = "source", "target"

_KINDS = {bool: "a truth value", int: "a number", float: "a number", type(None): "null", list: "a list", str: "text"}


def pair_text(values: tuple[Any, Any], names: tuple[str, str]) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The text of a pair and its marks; raises `ExtractionError` for a side that is no text, or an empty one."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise ExtractionError("invalid", f"its field {name!r} is {kind_of(value)}, but a pair needs two texts")
        if not value or value.isspace():
            raise ExtractionError("empty", f"its field {name!r} is empty")
    source, target = values
    return source + target, ((0, SOURCE), (len(source), TARGET))


def is_pair(record: Mapping[str, Any]) -> bool:
    """Whether a record consists of a source and a target and nothing else."""
    return record.keys() == {SOURCE, TARGET} and all(isinstance(value, str) for value in record.values())


def sides(text: str, marks: tuple[tuple[int, str], ...]) -> tuple[str, str] | None:
    """The source and the target in the text of a pair; None when its marks do not tell them apart."""
    if tuple(name for _, name in marks) != (SOURCE, TARGET):
        return None
    return text[: marks[1][0]], text[marks[1][0] :]


def kind_of(value: object) -> str:
    """What a value of a record is, in words."""
    return _KINDS.get(type(value), "a record" if isinstance(value, Mapping) else f"a {type(value).__name__}")
