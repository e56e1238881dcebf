"""Splits a corpus into training and validation, by document or at a tail.

By document: a document is held out if its keyed content hash is below the fraction, so the decision depends only on
the seed and the document. Tail: the last part of the text is held out, cut at the line end nearest to the requested
share (for pairs, between two pairs). Corpora with few documents always use a tail, because a few random draws would
miss the share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sheepop.core.errors import DataError
from sheepop.core.random import derive_seed
from sheepop.data.config import SplitMode
from sheepop.data.documents import Document, StoredDocument
from sheepop.data.extract.template import PAIR

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")
FEWEST_FOR_DOCUMENT_SPLIT = 20


def split_key(seed: int, document_id: str) -> float:
    """A number in [0, 1), uniform over document ids, that depends only on the id and the seed."""
    return derive_seed(seed, "validation split", document_id) / 2.0**63


class Splitter:
    """Assigns the documents of a corpus to splits, after all of them were counted."""

    def __init__(self, mode: SplitMode, fraction: float, seed: int) -> None:
        self.mode, self.fraction, self.seed = mode, fraction, seed
        self.documents = self.num_bytes = 0
        self._lowest, self._highest = (1.0, ""), (-1.0, "")

    def count(self, document_id: str, num_bytes: int) -> None:
        """Counts a document of `num_bytes` UTF-8 bytes."""
        self.documents += 1
        self.num_bytes += num_bytes
        key = (split_key(self.seed, document_id), document_id)
        self._lowest, self._highest = min(self._lowest, key), max(self._highest, key)

    @property
    def method(self) -> Literal["document", "tail", "none"]:
        """The method of the split; ``none`` holds nothing out."""
        if self.fraction == 0:
            return "none"
        return "tail" if self.mode == "tail" or self.documents < FEWEST_FOR_DOCUMENT_SPLIT else "document"

    @property
    def words(self) -> str:
        """A sentence that explains the split."""
        if self.method == "none":
            return "Nothing is held out, because validation_fraction is 0."
        if self.method == "tail":
            few = f"there are fewer than {FEWEST_FOR_DOCUMENT_SPLIT} documents ({self.documents}) to choose from"
            why = "data.split is tail" if self.mode == "tail" else few
            return f"The last {self.fraction:.2%} of the text, cut at a line end, is held out, because {why}."
        words = (
            f"{self.fraction * 100:g}% of the documents are held out, chosen by their content and the seed {self.seed}"
        )
        if self._lowest[0] >= self.fraction:
            return f"{words}; that chose none, so one is held out."
        if self._highest[0] < self.fraction:
            return f"{words}; that chose all, so one is kept."
        return f"{words}."

    def side(self, document_id: str, num_bytes: int, passed: int) -> SplitName | None:
        """The split of a document that has `passed` bytes before it; None if the tail may begin inside it."""
        if self.method == "none":
            return "train"
        if self.method == "tail":
            if 0 < passed >= self._tail_start:
                return "validation"
            return "train" if passed + num_bytes < self._tail_start else None
        # The lowest key is always held out and the highest never, so that neither split is empty.
        if document_id in (self._lowest[1], self._highest[1]):
            return "validation" if document_id == self._lowest[1] else "train"
        return "validation" if split_key(self.seed, document_id) < self.fraction else "train"

    def pieces(self, document: StoredDocument, passed: int) -> list[tuple[SplitName, StoredDocument]]:
        """The document, or its two pieces, with their splits; raises `DataError` if a tail cannot be cut there."""
        side = self.side(document.id, document.num_bytes, passed)
        return [(side, document)] if side else self._cut(document.document(), passed)

    @property
    def _tail_start(self) -> int:
        return self.num_bytes - max(1, round(self.num_bytes * self.fraction))

    def _cut(self, document: Document, passed: int) -> list[tuple[SplitName, StoredDocument]]:
        data = document.text.encode("utf-8")
        target = self._tail_start - passed
        places = {0, len(data)}
        if document.kind != PAIR:  # between the lines before and after the target, or at an end
            line_end = b"\n" if b"\n" in data else b"\r"
            places = {data.rfind(line_end, 0, target) + 1, data.find(line_end, target) + 1 or len(data)}
        if passed == 0:
            places.discard(0)
        if passed + len(data) == self.num_bytes:
            places.discard(len(data))
        cut = min(sorted(places), key=lambda place: abs(place - target), default=None)
        if cut is None:
            line = f"{document.source} is one long line, and a validation split is cut at a line end: it"
            what = "A single pair" if document.kind == PAIR else line
            raise DataError(f"{what} cannot be split. Add more, or set data.validation_fraction=0 to have none.")
        if cut in (0, len(data)):
            return [("validation" if cut == 0 else "train", document.stored())]
        middle, end = len(data[:cut].decode("utf-8")), len(document.text)
        return [("train", _piece(document, 0, middle)), ("validation", _piece(document, middle, end))]


def _piece(document: Document, start: int, stop: int) -> StoredDocument:
    """The characters ``start:stop`` of a document as a document, with the marks that apply there."""
    marks = [(max(0, offset - start), name) for offset, name in document.marks if offset < stop]
    last_before = max((i for i, (offset, _) in enumerate(marks) if offset == 0), default=0)
    return replace(document.draft(), text=document.text[start:stop], marks=marks[last_before:]).finished().stored()
