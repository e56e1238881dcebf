"""Training and validation: decided by document, never through one, except where a corpus has too few of them.

By document, a document is held out when its keyed content hash is below the fraction, so the decision depends on
nothing but the seed and the document. A tail is the last part of the text, cut at the line end nearest to the
wanted share (for pairs, between two of them); corpora with few documents are split so too, because a handful of draws
misses the share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sheepop.core.errors import DataError
from sheepop.core.random import derive_seed
from sheepop.data.config import SplitMode
from sheepop.data.documents import Document, StoredDocument
from sheepop.data.extract.pair import KIND

SplitName = Literal["train", "validation"]
FEWEST_FOR_DOCUMENT_SPLIT = 20


def split_key(seed: int, document_id: str) -> float:
    """A number in [0, 1) that is uniform over document ids and depends on nothing else but the seed."""
    return derive_seed(seed, "validation split", document_id) / 2.0**63


@dataclass
class Census:
    """What a split must know of all documents before the first is assigned, gathered one by one."""

    seed: int
    documents: int = 0
    num_bytes: int = 0
    lowest: tuple[float, str] = (1.0, "")
    highest: tuple[float, str] = (-1.0, "")

    def add(self, document_id: str, num_bytes: int) -> None:
        """Counts a document of `num_bytes` UTF-8 bytes."""
        self.documents += 1
        self.num_bytes += num_bytes
        key = (split_key(self.seed, document_id), document_id)
        self.lowest, self.highest = min(self.lowest, key), max(self.highest, key)


class Splitter:
    """Assigns the documents of a corpus, in order, to splits; `words` says in a sentence how.

    `cut_documents` counts the documents that a tail split cut in two (0 or 1), so that counts reconcile.
    """

    def __init__(self, mode: SplitMode, fraction: float, census: Census) -> None:
        self._census, self._fraction = census, fraction
        self.cut_documents = 0
        self.method: Literal["document", "tail", "none"]
        if fraction == 0:
            self.method, self.words = "none", "Nothing is held out, because validation_fraction is 0."
        elif mode == "tail" or census.documents < FEWEST_FOR_DOCUMENT_SPLIT:
            self.method, self.words = "tail", self._tail_words(mode)
        else:
            self.method, self.words = "document", self._document_words()

    def assign(
        self, documents: Iterable[StoredDocument], passed: int = 0
    ) -> Iterator[tuple[SplitName, StoredDocument]]:
        """Each document with its split; `passed` counts the bytes of the corpus that stand before these documents.

        Raises `DataError` when there is no place to cut a tail.
        """
        if self.method == "tail":
            yield from self._assign_tail(documents, passed)
        elif self.method == "document":
            for document in documents:
                yield self._by_key(document.id), document
        else:
            for document in documents:
                yield "train", document

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents to be split."""
        return self._census.num_bytes

    def trains(self, documents: Iterable[tuple[str, int]], passed: int) -> list[bool]:
        """For each document (id, bytes) whether it, or its beginning, is trained on; `passed` as in `assign`."""
        if self.method == "document":
            return [self._by_key(document_id) == "train" for document_id, _ in documents]
        end, answers = self._tail_start if self.method == "tail" else self._census.num_bytes, []
        for _, num_bytes in documents:
            answers.append(passed < end)
            passed += num_bytes
        return answers

    @property
    def _tail_start(self) -> int:
        total = self._census.num_bytes
        return total - max(1, round(total * self._fraction))

    def _by_key(self, document_id: str) -> SplitName:
        # The extremes of the keys keep both splits from being empty.
        if document_id == self._census.lowest[1]:
            return "validation"
        if document_id == self._census.highest[1]:
            return "train"
        return "validation" if split_key(self._census.seed, document_id) < self._fraction else "train"

    def _assign_tail(
        self, documents: Iterable[StoredDocument], passed: int
    ) -> Iterator[tuple[SplitName, StoredDocument]]:
        total, target = self._census.num_bytes, self._tail_start
        is_validation = 0 < passed >= target
        for document in documents:
            end = passed + document.num_bytes
            if is_validation:
                yield "validation", document
            elif end < target:
                yield "train", document
            else:
                is_validation = True
                whole = document.document()
                data = whole.text.encode("utf-8")
                nearest = _nearest_edge if whole.kind == KIND else _nearest_cut
                cut = nearest(data, target - passed, may_start=passed > 0, may_end=end < total)
                yield from self._cut(whole, data, cut)
            passed = end

    def _cut(self, document: Document, data: bytes, cut: int | None) -> Iterator[tuple[SplitName, StoredDocument]]:
        if cut is None:
            if document.kind == KIND:
                raise DataError(
                    "A single pair cannot be split. Add more, or set data.validation_fraction=0 to train without "
                    "validation."
                )
            raise DataError(
                f"The text cannot be split: {document.source} is one long line, and a validation split is cut at a "
                "line end. Add more documents, or set data.validation_fraction=0 to train without validation."
            )
        if cut == 0:
            yield "validation", document.stored()
        elif cut == len(data):
            yield "train", document.stored()
        else:
            self.cut_documents = 1
            pieces: tuple[tuple[SplitName, bytes], ...] = (("train", data[:cut]), ("validation", data[cut:]))
            for name, piece in pieces:
                yield name, _piece(document, piece.decode("utf-8"), from_start=name == "train").stored()

    def _tail_words(self, mode: SplitMode) -> str:
        words = f"The last {self._fraction:.2%} of the text, cut at a line end, is held out"
        if mode == "tail":
            return f"{words}, because data.split is tail."
        return (
            f"{words}, because there are fewer than {FEWEST_FOR_DOCUMENT_SPLIT} documents "
            f"({self._census.documents}) to choose from."
        )

    def _document_words(self) -> str:
        words = (
            f"A document is held out when its content hash, keyed by the seed {self._census.seed}, is below "
            f"{self._fraction:g}"
        )
        if self._census.lowest[0] >= self._fraction:
            return f"{words}; none was, so the lowest one is held out."
        if self._census.highest[0] < self._fraction:
            return f"{words}; all were, so the highest one is not."
        return f"{words}."


def _piece(document: Document, text: str, *, from_start: bool) -> Document:
    """The beginning or the end of a document, with the marks that lie in it."""
    start = 0 if from_start else len(document.text) - len(text)
    marks = [(max(0, offset - start), name) for offset, name in document.marks if offset < start + len(text)]
    last_before = max((i for i, (offset, _) in enumerate(marks) if offset == 0), default=0)
    return Document.of(
        text,
        document.source,
        document.part,
        kind=document.kind,
        language=document.language,
        place=document.place,
        marks=tuple(marks[last_before:]),
        facts=document.facts,
    )


def _nearest_cut(data: bytes, target: int, *, may_start: bool, may_end: bool) -> int | None:
    """The place in `data` nearest to `target` where a line ends, or its start or end where those are allowed."""
    line_end = b"\n" if b"\n" in data else b"\r"
    before = data.rfind(line_end, 0, target) + 1
    after = data.find(line_end, target) + 1 or len(data)
    places = [place for place in (before, after) if _is_inside(place, data, may_start, may_end)]
    return min(places, key=lambda place: abs(place - target), default=None)


def _nearest_edge(data: bytes, target: int, *, may_start: bool, may_end: bool) -> int | None:
    """The start or the end of `data`, whichever is allowed and nearer to `target`."""
    places = [*([0] if may_start else []), *([len(data)] if may_end else [])]
    return min(places, key=lambda place: abs(place - target), default=None)


def _is_inside(place: int, data: bytes, may_start: bool, may_end: bool) -> bool:
    return (place > 0 or may_start) and (place < len(data) or may_end)
