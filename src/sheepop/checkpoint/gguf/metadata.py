"""The metadata of a GGUF file: numbers, truth values, text, and lists of one of these, little endian, each with a type.

`Metadata` hands them out as plain Python values, `value_of` makes them from such.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError

# A vocabulary of SheepOp has at most this many tokens, and nothing in a GGUF file is longer than its vocabulary.
_LONGEST_LIST = 2**24
_LONGEST_TEXT = 2**28

Plain: TypeAlias = int | float | bool | str
Content: TypeAlias = Plain | list[str] | NDArray[np.generic]


class Cursor:
    """A place in `content`, the bytes of `path`, which reads little-endian numbers and never moves beyond their end."""

    def __init__(self, content: memoryview, path: Path) -> None:
        self.position = 0
        self._content = content
        self._path = path

    @property
    def left(self) -> int:
        """Bytes between here and the end."""
        return len(self._content) - self.position

    def take(self, size: int, what: str) -> bytes:
        """A copy of the next `size` bytes; raises `CheckpointError`, naming `what` they were, when there are fewer."""
        if size > self.left:
            raise self.problem(f"{what} needs {size:,} bytes, and only {self.left:,} are left")
        start = self.position
        self.position += size
        return bytes(self._content[start : self.position])

    def u32(self, what: str) -> int:
        """A whole number of 4 bytes."""
        number: int = struct.unpack("<I", self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """A whole number of 8 bytes."""
        number: int = struct.unpack("<Q", self.take(8, what))[0]
        return number

    def problem(self, reason: str) -> CheckpointError:
        """The error that names the file, the place in it and the reason."""
        return CheckpointError(
            f"{self._path} is damaged or not a GGUF file: at byte {self.position:,}, {reason}. Copy or download "
            "it again."
        )

    def unread(self, what: str, remedy: str) -> CheckpointError:
        """The error for a file that may be sound, but of a kind that is not read."""
        return CheckpointError(f"{self._path} {what}. {remedy}.")


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

    @property
    def plain(self) -> Any:
        """The value without its type; a number in single precision is the decimal with the fewest digits that gives it.

        1e-5, and not 9.99999974e-06. Truth values in a list are 0 and 1.
        """
        if isinstance(self.content, np.ndarray):
            return self.content.tolist()
        if self.type is ValueType.F32 and isinstance(self.content, float):
            return float(str(np.float32(self.content)))
        return self.content

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
        raise CheckpointError(f"{number:g} is too large for a GGUF file, which stores settings in single precision.")
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


def value_of(plain: bool | int | float | str | list[bool]) -> Value:
    """The value for what Python has: 4 bytes for a whole number, single precision for others."""
    if isinstance(plain, list):
        return flags(plain)
    if isinstance(plain, bool):
        return flag(plain)
    return text(plain) if isinstance(plain, str) else u32(plain) if isinstance(plain, int) else f32(plain)


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


class Metadata(Given):
    """The values of a file below ``prefix.``, beside `tensors` of these names.

    One whole number for each layer counts as one number when all are equal.
    """

    smallest = 0
    beyond = "is not a whole number of a reasonable size"

    def __init__(
        self, metadata: Mapping[str, Value], prefix: str, path: Path, tensors: Collection[str] = frozenset()
    ) -> None:
        below = f"{prefix}."
        keys = {key.removeprefix(below): value.plain for key, value in metadata.items() if key.startswith(below)}
        super().__init__(keys, str(path), below, tensors)

    def single(self, name: str, value: Any) -> Any:
        """The number that all layers have."""
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.problem(name, "differs from layer to layer, which SheepOp does not support")
        return value[0]

    def is_a(self, kind: type, value: Any) -> bool:
        """Whether a value is of `kind`; types are exact here, as they are for llama.cpp."""
        return type(value) is kind

    def shown(self, name: str) -> str:
        """The value of a key, unless it is missing or as long as a vocabulary."""
        return super().shown(name) if self.has(name) and not isinstance(self.take(name), list) else ""


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
