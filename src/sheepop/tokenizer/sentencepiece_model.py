"""Reads a SentencePiece model file (Protocol Buffers): pieces with scores and types, and the normalizer settings."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.charsmap import Charsmap
from sheepop.tokenizer.interface import SpecialRole
from sheepop.tokenizer.settings import check_file_size
from sheepop.tokenizer.vocabulary import BYTE_TOKENS

Value = int | bytes

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yields the number and value of each field, an int or bytes; raises `TokenizerError` if `message` is damaged."""
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
    try:
        return float(struct.unpack("<f", as_bytes(value))[0])
    except struct.error:
        raise _damaged() from None


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


_LARGEST_FILE = 2**26
_LARGEST_VOCABULARY = 2**21
_LONGEST_PIECE = 512
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class PieceType(IntEnum):
    """The type of a piece; only NORMAL and USER_DEFINED ones occur in text."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; its score is a log probability (Unigram) or minus its rank (BPE)."""

    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


@dataclass(frozen=True)
class NormalizerSpec:
    """The normalizer: a table of replacements, whether to put a space before a text, and to merge repeated spaces."""

    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


@dataclass(frozen=True)
class SentencePieceModel:
    """A model of the `type` ``unigram`` or ``bpe``; ids are indices into `pieces`, -1 for a role without a piece."""

    type: str
    pieces: tuple[Piece, ...]
    unknown_id: int
    role_ids: dict[SpecialRole, int]
    byte_fallback: bool
    normalizer: NormalizerSpec


def read_model(file: Path) -> SentencePieceModel:
    """Reads a model file; raises `TokenizerError` if it is damaged or has unsupported features."""
    check_file_size(file, _LARGEST_FILE)
    pieces: list[Piece] = []
    trainer, normalizer, denormalizer = b"", b"", b""
    for number, value in fields(file.read_bytes()):
        if number == 1:
            pieces.append(_piece(as_bytes(value)))
            if len(pieces) > _LARGEST_VOCABULARY:
                raise TokenizerError(f"it has more than {_LARGEST_VOCABULARY:,} pieces, or is damaged.")
        elif number == 2:
            trainer += as_bytes(value)
        elif number == 3:
            normalizer += as_bytes(value)
        elif number == 5:
            denormalizer += as_bytes(value)
    _check_pieces(pieces)
    training = _values(trainer, _TRAINER)
    if training["treat_whitespace_as_suffix"]:
        raise TokenizerError("it marks spaces after words (treat_whitespace_as_suffix), which is not supported.")
    if any(number == 2 and value for number, value in fields(denormalizer)):
        raise TokenizerError("it rewrites the text it decodes (denormalizer_spec), which is not supported.")
    kind = _MODEL_TYPES.get(training["model_type"], "unknown")
    if kind not in ("unigram", "bpe"):
        raise TokenizerError(f"it is a SentencePiece model of the type {kind}, but only unigram and bpe are supported.")
    unknown = next(token_id for token_id, piece in enumerate(pieces) if piece.type is PieceType.UNKNOWN)
    byte_fallback = bool(training["byte_fallback"])
    if byte_fallback and {piece.text for piece in pieces if piece.type is PieceType.BYTE} != set(BYTE_TOKENS):
        raise TokenizerError("it falls back to bytes (byte_fallback) but does not have all 256 of them. It is damaged.")
    roles: dict[SpecialRole, int] = {"unk": unknown, **{role: training[role] for role in ("bos", "eos", "pad")}}
    return SentencePieceModel(kind, tuple(pieces), unknown, roles, byte_fallback, _normalizer(normalizer))


def _piece(message: bytes) -> Piece:
    text, score, kind = _values(message, _PIECE).values()
    try:
        return Piece(text, score, PieceType(kind))
    except ValueError:
        raise TokenizerError(f"it is damaged: the piece {text!r} is of the unknown type {kind}.") from None


def _check_pieces(pieces: list[Piece]) -> None:
    if not pieces:
        raise TokenizerError("it is damaged or not a SentencePiece model: it has no pieces.")
    seen: set[str] = set()
    for token_id, piece in enumerate(pieces):
        if not piece.text or len(piece.text) > _LONGEST_PIECE or not math.isfinite(piece.score):
            raise TokenizerError(f"it is damaged: piece {token_id} is empty, too long, or has no finite score.")
        if piece.text in seen:
            raise TokenizerError(f"it is damaged: the piece {piece.text!r} occurs twice.")
        if piece.type is PieceType.UNUSED:
            raise TokenizerError(f"it marks the piece {piece.text!r} as unused, which is not supported.")
        seen.add(piece.text)
    unknown = [piece.text for piece in pieces if piece.type is PieceType.UNKNOWN]
    if len(unknown) != 1:
        raise TokenizerError(f"it is damaged: it must have one unknown piece, but has {len(unknown)}.")


# For each field its number, its reader, and its default.
_Fields = dict[str, tuple[int, Callable[[Value], Any], Any]]
_PIECE: _Fields = {"text": (1, as_text, ""), "score": (2, as_float, 0.0), "type": (3, as_number, 1)}
_TRAINER: _Fields = {
    "model_type": (3, as_number, 1),
    "treat_whitespace_as_suffix": (24, as_number, 0),
    "byte_fallback": (35, as_number, 0),
    "bos": (41, as_number, 1),
    "eos": (42, as_number, 2),
    "pad": (43, as_number, -1),
}
_NORMALIZER: _Fields = {
    "charsmap": (2, as_bytes, b""),
    "add_dummy_prefix": (3, as_number, 1),
    "remove_extra_whitespaces": (4, as_number, 1),
    "escape_whitespaces": (5, as_number, 1),
}


def _values(message: bytes, wanted: _Fields) -> dict[str, Any]:
    values = {name: default for name, (_, _, default) in wanted.items()}
    by_number = {number: (name, read) for name, (number, read, _) in wanted.items()}
    for number, value in fields(message):
        if number in by_number:
            name, read = by_number[number]
            values[name] = read(value)
    return values


def _normalizer(message: bytes) -> NormalizerSpec:
    values = _values(message, _NORMALIZER)
    if not values["escape_whitespaces"]:
        raise TokenizerError("it leaves spaces as they are (escape_whitespaces is off), which is not supported.")
    if values["charsmap"]:
        Charsmap(values["charsmap"])
    return NormalizerSpec(
        values["charsmap"], bool(values["add_dummy_prefix"]), bool(values["remove_extra_whitespaces"])
    )
