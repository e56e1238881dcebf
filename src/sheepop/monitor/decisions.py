"""What a person decided about the answers of a log: to keep one, to mend it, or to drop it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from sheepop.core.errors import DataError
from sheepop.core.json_lines import read_json_lines
from sheepop.monitor.answered import Answered
from sheepop.serve.protocol import RequestModel

FILE = "decisions.jsonl"
"""The file of decisions in the directory of a log; it only grows, and the last decision on an answer counts."""


class Decision(RequestModel):
    """A decision on the answer `choice` of a request; `text` is the mended answer."""

    id: Annotated[str, Field(max_length=100)]
    choice: Annotated[int, Field(ge=0)]
    decision: Literal["keep", "mend", "drop"]
    text: Annotated[str, Field(max_length=2**20)] | None = None
    time: Annotated[str, Field(max_length=40)] | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Decision:
        if (self.decision == "mend") is not bool((self.text or "").strip()):
            raise ValueError("a decision to mend has a text, and no other has one")
        return self


Decisions = Mapping[tuple[str, int], Decision]


def read_decisions(directory: str | Path) -> tuple[dict[tuple[str, int], Decision], int]:
    """Returns the last decision on each answer, and how many lines are no decision; without the file there are none.

    Raises `DataError` for a file that cannot be read.
    """
    found, path = {}, Path(directory) / FILE
    try:
        rows, num_bad = read_json_lines(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {(error.strerror or '').lower()}.") from None
    for row in rows:
        try:
            decision = Decision.model_validate(row)
        except ValidationError:
            num_bad += 1
        else:
            found[decision.id, decision.choice] = decision
    return found, num_bad


def reviewed(answers: Iterable[Answered], decisions: Decisions, left_out: Counter[str]) -> Iterator[Answered]:
    """Yields the answers as decided: one that was kept as a good one, one that was mended as a bad one followed by the
    good one, and none that was dropped, which `left_out` counts.
    """
    for each in answers:
        decided = decisions.get(each.name)
        if decided is None:
            yield each
        elif decided.decision == "drop":
            left_out["dropped in review"] += 1
        elif decided.text is None:
            yield replace(each, num_votes=max(1, each.num_votes), votes=max(1, each.votes))
        else:
            yield replace(each, num_votes=max(1, each.num_votes), votes=min(-1, each.votes))
            mended = decided.text if isinstance(each.answer, str) else {**each.answer, "content": decided.text}
            yield replace(each, answer=mended, reason="stop", ended="whole", num_votes=1, votes=1)
