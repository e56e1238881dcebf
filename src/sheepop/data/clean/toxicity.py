"""Removes documents that consist largely of slurs, sexually explicit words and threats."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from datatrove.data import Document

from sheepop.core.errors import DataError
from sheepop.data.clean.classifier import LinearClassifier
from sheepop.data.clean.config import ToxicityConfig
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.clean.toxic_lexicon import toxic_lexicon

_JUDGED = frozenset(("prose", "chat"))
_SHOWN = 3


class ToxicityFilter(FilterStage):
    """Removes toxic prose and chats, by a list of words or by a classifier that the user trained.

    The list is a weak signal: it counts words and does not know what is meant. A page that quotes slurs in order to
    explain them can go, and cruelty in plain words stays. Whoever needs more trains a classifier on examples of
    their own.
    """

    name = "toxicity"

    def __init__(self, ledger: Ledger, config: ToxicityConfig) -> None:
        super().__init__(ledger)
        self.config = config

    def removal(self, document: Document) -> Removal | None:
        """Why the document goes, with the score that decided."""
        if document.metadata.get("kind", "prose") not in _JUDGED:
            return None
        if self.config.classifier is not None:
            return self._by_classifier(document.text, self.config.classifier)
        return self._by_words(document.text)

    def _by_words(self, text: str) -> Removal | None:
        found = toxic_lexicon().hits(text, self.config.min_hits)
        hits = found.entries.total()
        if hits < self.config.min_hits or found.score <= self.config.threshold:
            return None
        most = ", ".join(
            entry for entry, _ in sorted(found.entries.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
        )
        return Removal("words", f"weight {found.score:.1f} for every 1,000 words, {hits} hits, most often {most}")

    def _by_classifier(self, text: str, path: str) -> Removal | None:
        probability = _classifier(path, _signature(path)).probability(text)
        if probability <= self.config.classifier_threshold:
            return None
        return Removal("classifier", f"probability {probability:.4f}")


def _signature(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DataError(f"The classifier {path} cannot be read: {(error.strerror or '').lower()}.") from None
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2)
def _classifier(path: str, signature: tuple[int, int]) -> LinearClassifier:
    return LinearClassifier.load(path)
