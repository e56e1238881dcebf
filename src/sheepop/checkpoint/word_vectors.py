"""Reads files of word vectors as streams: word2vec's text and binary formats, GloVe's, and fastText's ``.vec``."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import ConfigError, DataError

_LARGEST_DIMENSION = 2**16
_LONGEST_WORD = 2**10
_LONGEST_NUMBER = 40
_FASTTEXT_MODEL = struct.pack("<i", 793712314)
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZ": "bzip2", b"\xfd7": "xz"}

_Record = tuple[bytes, "bytes | Sequence[bytes]"]


@dataclass(frozen=True)
class WordVectors:
    """The vectors (N, D) of the tokens `ids` (N,), and the number of words in the file.

    `num_repeated` counts the repetitions of wanted words.
    """

    ids: NDArray[np.int64]
    vectors: NDArray[np.float32]
    num_words: int
    num_repeated: int


def read_word_vectors(path: Path, ids_of: Mapping[bytes, Sequence[int]], dimension: int) -> WordVectors:
    """Reads the vectors of the words in `ids_of`, each for all of its token ids; the first vector of a word counts.

    Words are UTF-8. Memory grows only with the vectors found. Raises `ConfigError` if the vectors do not have
    `dimension` numbers, and `DataError` if the file is damaged or of another format.
    """
    with _opened(path) as file:
        header = _Header.read(file, path)
        if header.dimension != dimension:
            raise ConfigError(
                f"The vectors in {path} have {header.dimension} numbers, but the model's have {dimension} "
                f"(model.d_model). Set model.d_model={header.dimension}, or use vectors of that size."
            )
        found: dict[bytes, NDArray[np.float32]] = {}
        num_words = num_repeated = 0
        file.seek(header.start)
        read = _binary_records if header.is_binary else _text_records
        for word, numbers in read(file, header, path):
            num_words += 1
            if word in found:
                num_repeated += 1
            elif word in ids_of:
                found[word] = _vector(numbers, word, path)
        if header.num_words is not None and num_words != header.num_words:
            raise DataError(
                f"{path} is damaged or truncated: its header states {header.num_words:,} words, but it has "
                f"{num_words:,}."
            )
    ids = [token_id for word in found for token_id in ids_of[word]]
    vectors = [vector for word, vector in found.items() for _ in ids_of[word]]
    table = np.array(vectors, dtype=np.float32).reshape(len(ids), dimension)
    return WordVectors(np.array(ids, dtype=np.int64), table, num_words, num_repeated)


def vector_dimension(path: Path) -> int:
    """Returns the dimension of the vectors in a file; raises `DataError` if it is damaged or of another format."""
    with _opened(path) as file:
        return _Header.read(file, path).dimension


@dataclass(frozen=True)
class _Header:
    """The facts at the beginning of a file. GloVe's files do not state `num_words`. Words begin at byte `start`."""

    num_words: int | None
    dimension: int
    is_binary: bool
    start: int

    @classmethod
    def read(cls, file: BinaryIO, path: Path) -> _Header:
        _refuse_other_formats(file.read(4), path)
        file.seek(0)
        start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(start)
        fields = file.readline(_LONGEST_WORD + _LARGEST_DIMENSION * _LONGEST_NUMBER).split()
        if len(fields) == 2 and all(field.isdigit() and len(field) < 12 for field in fields):
            num_words, dimension = map(int, fields)
            start = file.tell()
        else:
            num_words, dimension = None, len(fields) - 1
        if not 1 <= dimension <= _LARGEST_DIMENSION:
            raise _unreadable(path, "its first line is neither a word with its vector nor the two sizes of a table")
        file.seek(start)
        line = file.readline(_line_limit(dimension))
        is_text = not line or _split(line, dimension) is not None
        if not is_text and num_words is None:
            raise _unreadable(path, "its first line is not a word with its vector")
        return cls(num_words, dimension, not is_text, start)


def _refuse_other_formats(magic: bytes, path: Path) -> None:
    if magic == _FASTTEXT_MODEL:
        raise DataError(
            f"{path} is a complete fastText model, which builds vectors from parts of words; SheepOp reads tables of "
            "words. Use the .vec file that fastText writes with it."
        )
    for beginning, name in _COMPRESSED.items():
        if magic.startswith(beginning):
            raise DataError(f"{path} is compressed with {name}. Unpack it first.")


def _text_records(file: BinaryIO, header: _Header, path: Path) -> Iterator[_Record]:
    dimension, limit, number = header.dimension, _line_limit(header.dimension), 0
    while line := file.readline(limit):
        number += 1
        if not line.strip():
            continue
        record = _split(line, dimension) if len(line) < limit else None
        if record is None:
            raise DataError(f"{path} is damaged: word {number} does not have {dimension} numbers.")
        yield record


def _split(line: bytes, dimension: int) -> _Record | None:
    """Splits a line into a word, which may contain spaces, and its numbers; None if there are too few or too many."""
    word, *numbers = line.strip().rsplit(None, dimension) or [b""]
    # Most words are not wanted, so this checks only the last number and whether there is one too many.
    if len(numbers) != dimension or not _is_number(numbers[-1]):
        return None
    *before, last = word.rsplit(None, 1)
    return None if before and last[-1:].isdigit() and _is_number(last) else (word, numbers)


def _is_number(text: bytes) -> bool:
    try:
        _number(text)
    except ValueError:
        return False
    return True


def _number(text: bytes) -> float:
    if b"_" in text:  # Python allows it between digits
        raise ValueError
    return float(text)


def _binary_records(file: BinaryIO, header: _Header, path: Path) -> Iterator[_Record]:
    assert header.num_words is not None
    size = 4 * header.dimension
    pending = b""
    for number in range(1, header.num_words + 1):
        while b" " not in pending[: _LONGEST_WORD + 2] or len(pending) < _LONGEST_WORD + 2 + size:
            block = file.read(2**20)
            if not block:
                break
            pending += block
        word, space, rest = pending.partition(b" ")
        # Some programs end a record with a newline, others do not.
        word = word.lstrip(b"\n")
        if not space or len(word) > _LONGEST_WORD or len(rest) < size:
            raise DataError(f"{path} is damaged or truncated: word {number} of {header.num_words:,} is incomplete.")
        yield word, rest[:size]
        pending = rest[size:]
    if pending.strip() or file.read(1):
        raise DataError(f"{path} is damaged: it has more than the {header.num_words:,} words stated in its header.")


def _vector(numbers: bytes | Sequence[bytes], word: bytes, path: Path) -> NDArray[np.float32]:
    shown = word.decode("utf-8", errors="replace")
    try:
        if isinstance(numbers, bytes):
            vector = np.frombuffer(numbers, dtype="<f4").astype(np.float32)
        else:
            with np.errstate(over="ignore"):  # infinity is refused below
                vector = np.array([_number(number) for number in numbers]).astype(np.float32)
    except ValueError:
        raise DataError(f"{path} is damaged: the vector of {shown!r} contains a value that is not a number.") from None
    if not np.isfinite(vector).all():
        raise DataError(f"{path} cannot be used: the vector of {shown!r} contains numbers that are not finite.")
    return vector


def _line_limit(dimension: int) -> int:
    return _LONGEST_WORD + dimension * _LONGEST_NUMBER


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"The word vectors {path} cannot be read: {error.strerror}.") from None


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not a file of word vectors: {reason}. SheepOp reads word2vec's text and binary files, GloVe's, "
        "and fastText's .vec."
    )
