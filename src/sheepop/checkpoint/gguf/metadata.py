"""The metadata of a GGUF file: typed little-endian numbers, booleans and texts, and lists of one of these types.

`Metadata` converts them to Python values, `value_of` converts back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint.gguf.native_decoding import joined_texts
from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer.text_index import Texts

# SheepOp's limit for a vocabulary, the longest list in a GGUF file.
_LONGEST_LIST = 2**24
_LONGEST_TEXT = 2**28

Plain: TypeAlias = int | float | bool | str
Content: TypeAlias = Plain | Texts | NDArray[np.generic]


class Cursor:
    """Reads little-endian numbers from `content`, the bytes of `path`, and never reads beyond its end."""

    def __init__(self, content: memoryview, path: Path) -> None:
        self.position = 0
        self._content = content
        self._path = path

    @property
    def left(self) -> int:
        """The number of bytes left."""
        return len(self._content) - self.position

    def take(self, size: int, what: str) -> bytes:
        """Returns a copy of the next `size` bytes; raises `CheckpointError` that names `what` if there are fewer."""
        if size > self.left:
            raise self.problem(f"{what} needs {size:,} bytes, but only {self.left:,} are left")
        start = self.position
        self.position += size
        return bytes(self._content[start : self.position])

    def u32(self, what: str) -> int:
        """Reads an unsigned integer of 4 bytes."""
        return struct.unpack("<I", self.take(4, what))[0]

    def u64(self, what: str) -> int:
        """Reads an unsigned integer of 8 bytes."""
        return struct.unpack("<Q", self.take(8, what))[0]

    def texts(self, count: int, what: str) -> Texts:
        """Reads texts one after the other; raises `CheckpointError` as `read_text` does."""
        found = joined_texts(self._content, self.position, count)
        while found is None or not _are_texts(texts := Texts(*found[:2])):
            read_text(self, what)  # says what is wrong with the first wrong one
        self.position = found[2]
        return texts

    def problem(self, reason: str) -> CheckpointError:
        """Returns an error that names the file, the byte position and the reason."""
        return CheckpointError(
            f"{self._path} is damaged or not a GGUF file: at byte {self.position:,}, {reason}. Copy or download "
            "it again."
        )

    def unread(self, what: str, remedy: str) -> CheckpointError:
        """Returns an error for an intact file of an unsupported kind."""
        return CheckpointError(f"{self._path} {what}. {remedy}.")


def _are_texts(texts: Texts) -> bool:
    """Whether each is UTF-8 and not too long."""
    try:
        texts.text.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    starts = texts.starts
    cuts_character = (texts.text[starts[starts < len(texts.text)]] & 0xC0) == 0x80
    return not cuts_character.any() and bool(texts.lengths.max(initial=0) <= _LONGEST_TEXT)


# The type of a value, by its number in a file.
ValueType = IntEnum("ValueType", "U8 I8 U16 I16 U32 I32 F32 BOOL TEXT LIST U64 I64 F64", start=0)
# The format of a number of each type, for numpy and for `struct`.
_FORMATS = {kind: f"<{code}" for kind, code in zip(ValueType, "BbHhIifB..Qqd", strict=True) if code != "."}


@dataclass(frozen=True, eq=False)
class Value:
    """A value with its type, or a list with the type of its elements: an array, or texts as they stand in the file."""

    type: ValueType
    content: Content

    @property
    def is_list(self) -> bool:
        """Whether this is a list of values."""
        return isinstance(self.content, Texts | np.ndarray)

    @property
    def plain(self) -> Any:
        """The value as a Python object; a float32 becomes its shortest decimal, 1e-5 instead of 9.99999974e-06.

        Booleans in a list are 0 and 1.
        """
        if isinstance(self.content, np.ndarray):
            return self.content.tolist()
        if isinstance(self.content, Texts):
            return self.content.decoded()
        if self.type is ValueType.F32 and isinstance(self.content, float):
            return float(str(np.float32(self.content)))
        return self.content

    def encoded(self) -> bytes:
        """Returns the bytes that follow the key in a file."""
        if not self.is_list:
            plain = encoded_text(self.content) if isinstance(self.content, str) else _number(self.type, self.content)
            return _number(ValueType.U32, self.type) + plain
        assert isinstance(self.content, Texts | np.ndarray)
        head = _number(ValueType.U32, ValueType.LIST) + _number(ValueType.U32, self.type)
        head += _number(ValueType.U64, len(self.content))
        if isinstance(self.content, Texts):
            return head + b"".join(map(encoded_text, self.content.decoded()))
        return head + self.content.astype(_FORMATS[self.type]).tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.encoded() == other.encoded()

    def __hash__(self) -> int:
        return hash(self.encoded())


def texts(contents: Iterable[str]) -> Value:
    """Returns a list of texts as a value."""
    return Value(ValueType.TEXT, Texts.of([text.encode("utf-8") for text in contents]))


def i32s(numbers: Sequence[int]) -> Value:
    """Returns a list of integers as a value."""
    return Value(ValueType.I32, np.asarray(numbers, dtype=np.int32))


def f32s(numbers: Sequence[float]) -> Value:
    """Returns a list of float32 numbers as a value."""
    return Value(ValueType.F32, np.asarray(numbers, dtype=np.float32))


def value_of(plain: bool | int | float | str | list[bool] | list[int]) -> Value:
    """Converts a Python object to a value, a number to 4 bytes; raises `CheckpointError` if a float is too large."""
    if isinstance(plain, list) and plain and type(plain[0]) is int:
        return i32s(plain)
    if isinstance(plain, list):
        return Value(ValueType.BOOL, np.asarray(plain, dtype=np.uint8))
    if not isinstance(plain, float):
        return Value({bool: ValueType.BOOL, int: ValueType.U32, str: ValueType.TEXT}[type(plain)], plain)
    if math.isfinite(plain) and abs(plain) > np.finfo(np.float32).max:
        raise CheckpointError(f"{plain:g} is too large for a GGUF file, which stores settings in single precision.")
    return Value(ValueType.F32, float(np.float32(plain)))


def encoded_text(content: str) -> bytes:
    """Encodes a text as its length and its UTF-8 bytes."""
    utf8 = content.encode("utf-8")
    return _number(ValueType.U64, len(utf8)) + utf8


def read_text(cursor: Cursor, what: str, longest: int = _LONGEST_TEXT) -> str:
    """Reads a text of at most `longest` bytes at the cursor; `what` names it in errors."""
    length = cursor.u64(f"the length of {what}")
    if length > longest:
        raise cursor.problem(f"{what} claims to be {length:,} bytes long; SheepOp reads at most {longest:,}")
    try:
        return cursor.take(length, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise cursor.problem(f"{what} is not UTF-8 text ({error.reason})") from None


def read_value(cursor: Cursor, key: str) -> Value:
    """Reads the value of `key` at the cursor; refuses nested lists, and checks sizes before it allocates memory."""
    kind = _read_type(cursor, key)
    if kind is not ValueType.LIST:
        return Value(kind, _read_plain(cursor, kind, key))
    kind = _read_type(cursor, key)
    if kind is ValueType.LIST:
        raise cursor.problem(f"{key} is a list of lists, which SheepOp does not read")
    count = cursor.u64(f"the length of {key}")
    smallest = 8 if kind is ValueType.TEXT else np.dtype(_FORMATS[kind]).itemsize
    if count > _LONGEST_LIST:
        raise cursor.problem(f"{key} claims {count:,} entries; SheepOp reads at most {_LONGEST_LIST:,}")
    if count * smallest > cursor.left:
        raise cursor.problem(f"{key} claims {count:,} entries, but only {cursor.left:,} bytes are left")
    if kind is ValueType.TEXT:
        return Value(kind, cursor.texts(count, f"an entry of {key}"))
    return Value(kind, np.frombuffer(cursor.take(count * smallest, key), dtype=_FORMATS[kind]))


class Metadata(Given):
    """The values of a file whose keys begin with ``prefix.``; `tensors` are the names of its tensors.

    A list of one integer per layer counts as a single number if all are equal.
    """

    smallest = 0
    beyond = "is not an integer of a reasonable size"

    def __init__(
        self, metadata: Mapping[str, Value], prefix: str, path: Path, tensors: Collection[str] = frozenset()
    ) -> None:
        below = f"{prefix}."
        self._values = {key.removeprefix(below): value for key, value in metadata.items() if key.startswith(below)}
        super().__init__(_Plain(self._values), str(path), below, tensors)

    def texts(self, name: str) -> Texts:
        """Takes a list of texts."""
        found = self._content(name)
        if not isinstance(found, Texts):
            raise self.problem(name, "is not a list of texts")
        return found

    def numbers(self, name: str, kind: type[int] | type[float]) -> NDArray[Any]:
        """Takes a list of whole numbers, or of finite floats."""
        found = self._content(name)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in ("iu" if kind is int else "f"):
            raise self.problem(name, f"is not a list of {'whole ' if kind is int else ''}numbers")
        if not np.isfinite(found).all():
            raise self.problem(name, "has entries that are not finite")
        return found

    def _content(self, name: str) -> Content:
        self._read.add(name)
        if name not in self._values:
            raise self.missing(name)
        return self._values[name].content

    def single(self, name: str, value: Any) -> Any:
        """Returns the number that all layers share."""
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.problem(name, "differs from layer to layer, which SheepOp does not support")
        return value[0]

    def is_a(self, kind: type, found: type) -> bool:
        """Whether a value of type `found` has exactly the type `kind`, as llama.cpp requires."""
        return found is kind

    def shown(self, name: str) -> str:
        """Returns the value of a key for messages, empty if it is missing or a list, which may be a vocabulary."""
        return super().shown(name) if self.has(name) and not isinstance(self.take(name), list) else ""


class _Plain(Mapping[str, Any]):
    """Values as Python objects, each converted when it is asked for: a vocabulary takes long."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name].plain

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _read_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(f"the type of {key}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.problem(f"{key} has the unknown type {number}") from None


def _read_plain(cursor: Cursor, kind: ValueType, key: str) -> Plain:
    if kind is ValueType.TEXT:
        return read_text(cursor, key)
    layout = _FORMATS[kind]
    (number,) = struct.unpack(layout, cursor.take(struct.calcsize(layout), key))
    return bool(number) if kind is ValueType.BOOL else number


def _number(kind: ValueType, number: Content) -> bytes:
    return struct.pack(_FORMATS[kind], number)
