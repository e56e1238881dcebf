"""Metadata values of a GGUF file: numbers, truth values, text, and lists of one of these, little endian."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint.gguf.cursor import Cursor
from sheepop.core.errors import CheckpointError

# A vocabulary of SheepOp has at most this many tokens, and nothing in a GGUF file is longer than its vocabulary.
_LONGEST_LIST = 2**24
_LONGEST_TEXT = 2**28

Plain: TypeAlias = int | float | bool | str
Content: TypeAlias = Plain | list[str] | NDArray[np.generic]


class ValueType(IntEnum):
    """The number that stands for a type of value in a file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    TEXT = 8
    LIST = 9
    U64 = 10
    I64 = 11
    F64 = 12


# The type as numpy and `struct` call it.
_FORMATS: dict[ValueType, tuple[str, str]] = {
    ValueType.U8: ("<u1", "<B"),
    ValueType.I8: ("<i1", "<b"),
    ValueType.U16: ("<u2", "<H"),
    ValueType.I16: ("<i2", "<h"),
    ValueType.U32: ("<u4", "<I"),
    ValueType.I32: ("<i4", "<i"),
    ValueType.F32: ("<f4", "<f"),
    ValueType.BOOL: ("<u1", "<B"),
    ValueType.U64: ("<u8", "<Q"),
    ValueType.I64: ("<i8", "<q"),
    ValueType.F64: ("<f8", "<d"),
}


@dataclass(frozen=True, eq=False)
class Value:
    """One value with its type; of a list, the type of its elements. Numbers in a list stand in a numpy array."""

    type: ValueType
    content: Content

    @property
    def is_list(self) -> bool:
        """Whether this is a list of values."""
        return isinstance(self.content, list | np.ndarray)

    def encoded(self) -> bytes:
        """The bytes of the value in a file, behind its key."""
        if not self.is_list:
            return _number(ValueType.U32, self.type) + _encoded_plain(self.type, self.content)
        assert isinstance(self.content, list | np.ndarray)
        head = _number(ValueType.U32, ValueType.LIST) + _number(ValueType.U32, self.type)
        head += _number(ValueType.U64, len(self.content))
        if isinstance(self.content, list):
            return head + b"".join(encoded_text(text) for text in self.content)
        return head + self.content.astype(_FORMATS[self.type][0]).tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.encoded() == other.encoded()

    def __hash__(self) -> int:
        return hash(self.encoded())


def u32(number: int) -> Value:
    """A whole number from 0 to 2^32 - 1."""
    return Value(ValueType.U32, number)


def f32(number: float) -> Value:
    """A number in single precision; raises `CheckpointError` for one that is too large."""
    if math.isfinite(number) and abs(number) > np.finfo(np.float32).max:
        raise CheckpointError(f"{number:g} is too large for a GGUF file, which has its settings in single precision.")
    return Value(ValueType.F32, float(np.float32(number)))


def flag(truth: bool) -> Value:
    """True or false."""
    return Value(ValueType.BOOL, truth)


def text(content: str) -> Value:
    """Unicode text."""
    return Value(ValueType.TEXT, content)


def texts(contents: Iterable[str]) -> Value:
    """A list of Unicode texts."""
    return Value(ValueType.TEXT, list(contents))


def flags(truths: Sequence[bool]) -> Value:
    """A list of true and false."""
    return Value(ValueType.BOOL, np.asarray(truths, dtype=np.uint8))


def i32s(numbers: Sequence[int]) -> Value:
    """A list of whole numbers."""
    return Value(ValueType.I32, np.asarray(numbers, dtype=np.int32))


def f32s(numbers: Sequence[float]) -> Value:
    """A list of numbers in single precision."""
    return Value(ValueType.F32, np.asarray(numbers, dtype=np.float32))


def shortest_decimal(number: float) -> float:
    """The number with the fewest digits that single precision cannot tell from `number`: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(number)))


def encoded_text(content: str) -> bytes:
    """Text as its length and its UTF-8 bytes."""
    utf8 = content.encode("utf-8")
    return _number(ValueType.U64, len(utf8)) + utf8


def read_text(cursor: Cursor, what: str, longest: int = _LONGEST_TEXT) -> str:
    """Text at the cursor, of at most `longest` bytes; `what` it is stands in errors."""
    length = cursor.u64(f"the length of {what}")
    if length > longest:
        raise cursor.problem(f"{what} claims to be {length:,} bytes long; at most {longest:,} are read")
    try:
        return cursor.take(length, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise cursor.problem(f"{what} is not UTF-8 text ({error.reason})") from None


def read_value(cursor: Cursor, key: str) -> Value:
    """The value of `key` at the cursor; lists of lists are refused, and sizes are checked before memory is taken."""
    kind = _read_type(cursor, key)
    if kind is not ValueType.LIST:
        return Value(kind, _read_plain(cursor, kind, key))
    kind = _read_type(cursor, key)
    if kind is ValueType.LIST:
        raise cursor.problem(f"{key} is a list of lists, which SheepOp does not read")
    count = cursor.u64(f"the length of {key}")
    smallest = 8 if kind is ValueType.TEXT else np.dtype(_FORMATS[kind][0]).itemsize
    if count > _LONGEST_LIST:
        raise cursor.problem(f"{key} claims {count:,} entries; at most {_LONGEST_LIST:,} are read")
    if count * smallest > cursor.left:
        raise cursor.problem(f"{key} claims {count:,} entries, and only {cursor.left:,} bytes are left")
    if kind is ValueType.TEXT:
        return Value(kind, [read_text(cursor, f"entry {index} of {key}") for index in range(count)])
    return Value(kind, np.frombuffer(cursor.take(count * smallest, key), dtype=_FORMATS[kind][0]))


def _read_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(f"the type of {key}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.problem(f"{key} is of the unknown type {number}") from None


def _read_plain(cursor: Cursor, kind: ValueType, key: str) -> Plain:
    if kind is ValueType.TEXT:
        return read_text(cursor, key)
    layout = _FORMATS[kind][1]
    (number,) = struct.unpack(layout, cursor.take(struct.calcsize(layout), key))
    return bool(number) if kind is ValueType.BOOL else number


def _encoded_plain(kind: ValueType, content: Content) -> bytes:
    if kind is ValueType.TEXT:
        assert isinstance(content, str)
        return encoded_text(content)
    return struct.pack(_FORMATS[kind][1], content)


def _number(kind: ValueType, number: int) -> bytes:
    return struct.pack(_FORMATS[kind][1], number)
