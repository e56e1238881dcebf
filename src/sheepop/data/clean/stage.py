"""What every cleaning stage is: documents in, documents out, with account kept of what it removed and changed."""

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
    """Why a document goes: one or two words to count by, and a clause with the value that decided."""

    reason: str
    detail: str = ""


def above(reason: str, what: str, value: float, most: float, spelled: str = ".0%") -> Removal | None:
    """A removal where `value` is more than `most`; `what` says of what, with the value put in its braces."""
    return Removal(reason, f"{what.format(value)}, more than {most:{spelled}}") if value > most else None


def below(
    reason: str, what: str, value: float, least: float, spelled: str = ".0%", less: str = "less"
) -> Removal | None:
    """A removal where `value` is less than `least`."""
    return Removal(reason, f"{what.format(value)}, {less} than {least:{spelled}}") if value < least else None


def named(rules: str, removal: Removal | None) -> Removal | None:
    """The removal with the name of the rules before its reason and its detail."""
    return removal and Removal(f"{rules} {removal.reason}", f"{rules}: {removal.detail}")


class Stage(ABC):
    """A step with a `name` of the configuration, its settings, and an account, which all steps of a pass share."""

    name: ClassVar[str]

    def __init__(self, account: Account, config: Config, *, seed: int = 0) -> None:
        self.account, self.config, self.seed = account, config, seed

    @abstractmethod
    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """The documents that stay, in order."""


class FilterStage(Stage):
    """Removes documents; it may also note what it found in the document."""

    @abstractmethod
    def removal(self, document: Draft) -> Removal | None:
        """Why the document goes, or None when it stays."""

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """The documents that stay, in order."""
        for document in documents:
            removal = self.removal(document)
            if removal is None:
                yield document
            else:
                self.account.removed(self.name, document, removal.reason, removal.detail)


class ChangeStage(Stage):
    """Changes the text of documents; one that is empty afterwards is removed, and so is a pair with an empty side."""

    @abstractmethod
    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The text to put in place of `text`, a segment of the document's, and what was done how often."""

    def applies_to(self, document: Draft) -> bool:
        """Whether this document may be changed at all."""
        return True

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """The documents, in order, changed where there was something to change."""
        for document in documents:
            if self.applies_to(document):
                self._change(document)
                if _is_blank(document):
                    self.account.removed(self.name, document, "empty", "no text was left")
                    continue
            yield document

    def _change(self, document: Draft) -> None:
        """Changes the text between marks piece by piece, so that every mark stays where its page begins."""
        before, marks = document.text, document.marks
        pieces: list[str] = []
        counts: Counter[str] = Counter()
        for begin, end in pairwise((0, *(offset for offset, _ in marks), len(before))):
            piece, found = self.changed(before[begin:end], document)
            pieces.append(piece)
            counts.update(found)
        document.text = "".join(pieces)
        document.marks = [
            (offset, name) for offset, (_, name) in zip(accumulate(map(len, pieces)), marks, strict=False)
        ]
        if document.text != before:
            self.account.changed(self.name, before, document.text, counts)


def _is_blank(document: Draft) -> bool:
    texts = sides(document.text, tuple(document.marks)) if document.kind == PAIR else None
    return any(is_empty(text) for text in texts or (document.text,))


class Finding(NamedTuple):
    """A value to replace: where it stands, its kind, a more exact name, and the form that all spellings share."""

    start: int
    end: int
    kind: str
    name: str
    value: str


class Replacement(ChangeStage):
    """Puts a placeholder with type and short keyed hash, such as ``<EMAIL_3f2a>``, in place of every finding.

    The same value gives the same placeholder wherever it stands, so that who wrote to whom can still be followed.
    Four hexadecimal digits are few on purpose: many thousand telephone numbers share each placeholder, and even
    someone who knows the seed cannot read the number off. A secret salt also keeps others from testing a guess.
    """

    config: PlaceholderConfig

    @abstractmethod
    def findings(self, text: str, document: Draft) -> list[Finding]:
        """What to replace in a segment of the document, in the order in which it stands; without overlaps."""

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The text with placeholders, and how many of each name."""
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
