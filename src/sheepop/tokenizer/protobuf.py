"""Reads the wire format of Protocol Buffers, as far as a SentencePiece model needs it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from sheepop.core.errors import TokenizerError

Value = int | bytes

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yields the number and the value of every field of a message, in order.

    Varints are unsigned integers; fixed-size and length-delimited values are bytes. Raises `TokenizerError` if
    `message` is damaged.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise _damaged()
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _LENGTH:
            length, place = _varint(message, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _damaged()
        if length > len(message) - place:
            raise _damaged()
        yield number, message[place : place + length]
        place += length


def as_number(value: Value) -> int:
    """The value of a field that is a signed 32-bit number, a boolean or an enumeration."""
    if not isinstance(value, int):
        raise _damaged()
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def as_bytes(value: Value) -> bytes:
    """The value of a field that is bytes or another message."""
    if not isinstance(value, bytes):
        raise _damaged()
    return value


def as_text(value: Value) -> str:
    """The value of a field that is UTF-8 text."""
    try:
        return as_bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise _damaged() from None


def as_float(value: Value) -> float:
    """The value of a field that is a 32-bit floating-point number."""
    data = as_bytes(value)
    if len(data) != 4:
        raise _damaged()
    number: float = struct.unpack("<f", data)[0]
    return number


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of up to 64 bits, stored in 7 bits per byte, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _damaged()


def _damaged() -> TokenizerError:
    return TokenizerError("it is damaged or not a SentencePiece model: its bytes are not the fields of one.")
