"""Reads a SentencePiece model file: pieces with scores and types, and the settings of the normalizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.alphabet import BYTE_TOKENS
from sheepop.tokenizer.charsmap import Charsmap
from sheepop.tokenizer.interface import SpecialRole
from sheepop.tokenizer.protobuf import Value, as_bytes, as_float, as_number, as_text, fields
from sheepop.tokenizer.settings import check_file_size

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
    roles: dict[SpecialRole, int] = {"unk": unknown, "bos": training["bos"], "eos": training["eos"]}
    return SentencePieceModel(
        kind, tuple(pieces), unknown, {**roles, "pad": training["pad"]}, byte_fallback, _normalizer(normalizer)
    )


def _piece(message: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
    for number, value in fields(message):
        if number == 1:
            text = as_text(value)
        elif number == 2:
            score = as_float(value)
        elif number == 3:
            kind = as_number(value)
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
