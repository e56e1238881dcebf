"""Removes documents that contain text of the evaluation sets, so that scores do not measure memorization."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sheepop.core.errors import DataError
from sheepop.core.json_lines import BadLine, parsed_lines
from sheepop.data.clean.config import DecontaminationConfig
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.documents import Draft
from sheepop.data.duplicates.shingles import Hashes, shingles_of_words, spelled_words, word_hashes
from sheepop.data.extract.text import byte_lines

# One rule for all kinds of documents, because evaluation sets do not state the kind of their texts.
_RULE = "prose"
_LONGEST_LINE = 2**26
_MOST_FILTER_BITS = 24
_SHOWN_CHARACTERS = 200


class Decontamination(FilterStage):
    """Removes documents that share a word n-gram with an evaluation text; without evaluation sets it keeps all."""

    name = "decontamination"
    config: DecontaminationConfig

    _sets: EvaluationSets | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the evaluation sets, which each process reads for itself."""
        return {**self.__dict__, "_sets": None}

    def removal(self, document: Draft) -> Removal | None:
        """A removal that names the evaluation file, the line and the words of the first shared n-gram, or None."""
        if not self.config.paths:
            return None
        if self._sets is None:
            self._sets = load_evaluation_sets(self.config)
        found = list(islice(self._sets.matches(document.text), self.config.min_matches))
        if len(found) < self.config.min_matches:
            return None
        text, word, words = found[0].text, found[0].word, found[0].words
        shown = " ".join(spelled_words(text.text)[word : word + words])[:_SHOWN_CHARACTERS]
        return Removal("evaluation text", f"{words} words of {text.path}, line {text.line}: {shown}")


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text of an evaluation set, with its file and line."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """The counts of one evaluation file: texts to match, and texts that are too short to match."""

    path: str
    sha256: str
    texts: int
    too_short: int


@dataclass(frozen=True, slots=True)
class Match:
    """An n-gram shared with an evaluation text: its first word there, and its length in words."""

    text: EvaluationText
    word: int
    words: int


class EvaluationSets:
    """The n-grams of all texts in the configured files.

    Words are runs of letters, digits and marks in lower case, so that case, punctuation and white space do not matter
    (after Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C); each character of a script without
    spaces is a word. N-grams are compared by 64-bit hashes.
    """

    def __init__(self, config: DecontaminationConfig) -> None:
        self.files: list[EvaluationFile] = []
        self._texts: list[EvaluationText] = []
        grams: dict[int, list[tuple[Hashes, int]]] = {}
        for path in config.paths:
            before, too_short, digest = len(self._texts), 0, hashlib.sha256()
            for text in _texts(path, config.fields, digest):
                hashes = hashed_words(text.text)
                words = min(config.ngram, hashes.size)
                if words < min(config.min_words, config.ngram):
                    too_short += 1
                    continue
                grams.setdefault(words, []).append((shingles_of_words(hashes, _RULE, words), len(self._texts)))
                self._texts.append(text)
            self.files.append(EvaluationFile(path, digest.hexdigest(), len(self._texts) - before, too_short))
        self._grams = {words: _Grams(entries) for words, entries in sorted(grams.items())}

    def matches(self, text: str) -> Iterator[Match]:
        """Yields the distinct n-grams that `text` shares with evaluation texts, by length, then in text order."""
        if not self._grams:
            return
        hashes = hashed_words(text)
        for words, grams in self._grams.items():
            if hashes.size >= words:
                for number, word in grams.among(shingles_of_words(hashes, _RULE, words)):
                    yield Match(self._texts[number], word, words)


class _Grams:
    """The n-grams of one length: their sorted hashes, and the text and word at which each first occurs."""

    def __init__(self, entries: list[tuple[Hashes, int]]) -> None:
        hashes = np.concatenate([gram_hashes for gram_hashes, _ in entries])
        numbers = np.concatenate([np.full(found.size, number, np.int32) for found, number in entries])
        words = np.concatenate([np.arange(found.size, dtype=np.int32) for found, _ in entries])
        self._hashes, first = np.unique(hashes, return_index=True)
        self._numbers, self._words = numbers[first], words[first]
        # Few n-grams of a corpus pass this table, which is much faster than a search in the sorted hashes.
        bits = min(_MOST_FILTER_BITS, self._hashes.size.bit_length() + 5)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(2**bits, dtype=bool)
        self._filter[self._hashes >> self._shift] = True

    def among(self, hashes: Hashes) -> Iterator[tuple[int, int]]:
        """Yields, for each distinct hash that is known, the text and word at which it first occurs, in order."""
        candidates = hashes[self._filter[hashes >> self._shift]]
        entries = np.searchsorted(self._hashes, candidates)
        entries[entries == self._hashes.size] = 0
        for entry in dict.fromkeys(entries[self._hashes[entries] == candidates].tolist()):
            yield int(self._numbers[entry]), int(self._words[entry])


def hashed_words(text: str) -> Hashes:
    """A hash for each word."""
    return word_hashes(text if text.isascii() else unicodedata.normalize("NFC", text), _RULE)


def load_evaluation_sets(config: DecontaminationConfig) -> EvaluationSets:
    """The evaluation sets, read once per process and again after a file changed; raises `DataError` if unreadable."""
    try:
        states = [Path(path).stat() for path in config.paths]
        return _load(config, tuple((state.st_size, state.st_mtime_ns) for state in states))
    except OSError as error:
        path = error.filename or " or ".join(config.paths)
        raise DataError(f"The evaluation set {path} cannot be read: {(error.strerror or '').lower()}.") from None


@lru_cache(maxsize=2)
def _load(config: DecontaminationConfig, signatures: tuple[tuple[int, int], ...]) -> EvaluationSets:
    return EvaluationSets(config)


def _texts(path: str, fields: tuple[str, ...], digest: Any) -> Iterator[EvaluationText]:
    """Yields the texts of a JSONL file, from the given fields or from all if there are none."""
    missing = set(fields)
    with Path(path).open("rb") as file:
        for number, record in parsed_lines(_hashed_lines(file, path, digest)):
            if isinstance(record, BadLine):
                raise DataError(
                    f"{path}, line {number}: {record.reason}; an evaluation set must have one JSON object per line."
                )
            missing.difference_update(record)
            values = [record[field] for field in fields if field in record] if fields else [record]
            for text in _strings(values):
                yield EvaluationText(path, number, text)
    if missing:
        raise DataError(
            f"The evaluation set {path} has no field {', '.join(filter(missing.__contains__, fields))}. Give its own "
            "fields in data.clean.decontamination.fields, or none to take all text."
        )


def _hashed_lines(file: BinaryIO, path: str, digest: Any) -> Iterator[bytes]:
    """The lines of a file, which `digest` is updated with; raises `DataError` for one that is too long."""
    for number, line in enumerate(byte_lines(file, _LONGEST_LINE), 1):
        if line is None:
            what = f"longer than {_LONGEST_LINE:,} bytes, which is too long for an evaluation item"
            raise DataError(f"{path}, line {number}: {what}.")
        digest.update(line)
        yield line


def _strings(value: Any) -> Iterator[str]:
    """Yields every string in nested lists and objects, in order."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            pending.extend(reversed(item))
