"""Removes documents that hold text of the evaluation sets, so that a score measures more than memory."""

from __future__ import annotations

from itertools import islice
from typing import Any

from datatrove.data import Document

from sheepop.data.clean.config import DecontaminationConfig
from sheepop.data.clean.evaluation_sets import EvaluationSets, Match, load_evaluation_sets, spelled_words
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stage import FilterStage, Removal

_SHOWN_CHARACTERS = 200


class Decontamination(FilterStage):
    """Removes a document that shares an n-gram of words with an evaluation text; keeps all when none are configured."""

    name = "decontamination"

    def __init__(self, ledger: Ledger, config: DecontaminationConfig) -> None:
        super().__init__(ledger)
        self.config = config
        self._sets: EvaluationSets | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the evaluation sets, which each process reads for itself."""
        return {**self.__dict__, "_sets": None}

    def removal(self, document: Document) -> Removal | None:
        """Names the evaluation file, the line and the words of the first n-gram that the document shares."""
        if not self.config.paths:
            return None
        if self._sets is None:
            self._sets = load_evaluation_sets(self.config)
        found = list(islice(self._sets.matches(document.text), self.config.min_matches))
        if len(found) < self.config.min_matches:
            return None
        return Removal("evaluation text", _described(found[0]))


def _described(match: Match) -> str:
    words = spelled_words(match.text.text)[match.word : match.word + match.words]
    shown = " ".join(words)[:_SHOWN_CHARACTERS]
    return f"{match.words} words of {match.text.path}, line {match.text.line}: {shown}"
