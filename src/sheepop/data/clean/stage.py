"""The base classes of cleaning stages, which filter or change documents and record what they removed and changed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

from sheepop.core.config import Config
from sheepop.core.random import derive_seed
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import PlaceholderConfig
from sheepop.data.documents import Draft, is_empty
from sheepop.data.extract.template import PAIR, sides

_DIGEST_BYTES = 2


@dataclass(frozen=True, slots=True)
class Removal:
    """Why a document is removed: a reason of one or two words to count by, and a clause with the measured value."""

    reason: str
    detail: str = ""


def above(reason: str, what: str, value: float, most: float, spelled: str = ".0%") -> Removal | None:
    """A removal if `value` is more than `most`; `what` is the clause, with braces for the value."""
    return Removal(reason, f"{what.format(value)}, more than {most:{spelled}}") if value > most else None


def below(
    reason: str, what: str, value: float, least: float, spelled: str = ".0%", less: str = "less"
) -> Removal | None:
    """A removal if `value` is less than `least`, like `above`."""
    return Removal(reason, f"{what.format(value)}, {less} than {least:{spelled}}") if value < least else None


def named(rules: str, removal: Removal | None) -> Removal | None:
    """The removal with the name of the rules before reason and detail; None stays None."""
    return removal and Removal(f"{rules} {removal.reason}", f"{rules}: {removal.detail}")


class Stage(ABC):
    """A cleaning stage: its `name` in the configuration, its settings, and the account that a pass shares."""

    name: ClassVar[str]

    def __init__(self, account: Account, config: Config, *, seed: int = 0) -> None:
        self.account, self.config, self.seed = account, config, seed

    @abstractmethod
    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """Yields the documents that stay, in order."""


class FilterStage(Stage):
    """A stage that removes documents; it may also set fields of those that stay."""

    @abstractmethod
    def removal(self, document: Draft) -> Removal | None:
        """Why the document is removed, or None if it stays."""

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """Yields the documents that stay, in order."""
        for document in documents:
            removal = self.removal(document)
            if removal is None:
                yield document
            else:
                self.account.removed(self.name, document, removal.reason, removal.detail)


class ChangeStage(Stage):
    """A stage that changes the text of documents; removes those left empty, and pairs with a side left empty."""

    @abstractmethod
    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The new text for `text`, a segment of the document, and the number of changes by name."""

    def applies_to(self, document: Draft) -> bool:
        """Whether the stage may change this document."""
        return True

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """Yields the documents, changed, in order."""
        for document in documents:
            if self.applies_to(document):
                self._change(document)
                texts = sides(document.text, tuple(document.marks)) if document.kind == PAIR else None
                if any(map(is_empty, texts or (document.text,))):
                    self.account.removed(self.name, document, "empty", "no text was left")
                    continue
            yield document

    def _change(self, document: Draft) -> None:
        """Changes the text between marks piece by piece, so that every mark stays at the start of its page."""
        before, marks = document.text, document.marks
        pieces: list[str] = []
        counts: Counter[str] = Counter()
        for begin, end in pairwise((0, *(offset for offset, _ in marks), len(before))):
            piece, found = self.changed(before[begin:end], document)
            pieces.append(piece)
            counts.update(found)
        document.text = "".join(pieces)
        offsets = accumulate(map(len, pieces))
        document.marks = [(offset, name) for offset, (_, name) in zip(offsets, marks, strict=False)]
        if document.text != before:
            self.account.changed(self.name, before, document.text, counts)


class Finding(NamedTuple):
    """A value to replace: its span, its kind, a more exact name, and a normal form for all its spellings."""

    start: int
    end: int
    kind: str
    name: str
    value: str


class Replacement(ChangeStage):
    """Replaces every finding with a placeholder of its kind and a short keyed hash, such as ``<EMAIL_3f2a>``.

    Equal values get equal placeholders everywhere, so a reader can still see who wrote to whom. The hash is short on
    purpose: many thousand telephone numbers share each four-digit value, so even someone who knows the seed cannot
    recover the number. A secret salt also prevents others from testing a guess.
    """

    config: PlaceholderConfig

    @abstractmethod
    def findings(self, text: str, document: Draft) -> list[Finding]:
        """The values to replace in a segment of the document, in text order, without overlaps."""

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The text with placeholders, and the number of findings of each name."""
        findings = self.findings(text, document)
        pieces: list[str] = []
        position = 0
        for start, end, kind, _, value in findings:
            pieces += (text[position:start], self._placeholder(kind, value))
            position = end
        return "".join((*pieces, text[position:])), Counter(finding.name for finding in findings)

    def _placeholder(self, kind: str, value: str) -> str:
        message = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(message, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
        return f"<{kind.upper()}_{digest}>"

    @cached_property
    def _key(self) -> bytes:
        seed = derive_seed(self.seed, "placeholders")
        return hashlib.blake2b(f"{seed}\0{self.config.salt}".encode("utf-8", "surrogatepass")).digest()
