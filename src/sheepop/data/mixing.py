"""How often documents of different sources occur: by epochs, or by the share of the training text.

A source is named by a pattern over the printable file names. With `epochs` every training document of the source
occurs that often; a fraction is a keyed choice of documents, the same in every build. With `weight` the epochs follow
from the shares: source i of size s_i occurs ``w_i / sum(w) * sum(s) / s_i`` times, so that the text stays as long as
it was and the shares are as asked. Held-out documents occur once, whatever the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config
from sheepop.core.errors import DataError
from sheepop.core.random import derive_seed
from sheepop.data.discovery import ignore_spec

MOST_STEPS = 10_000_000  # a table with an entry for each step up to the last point is kept


class SourcePattern(Config):
    """The documents of the files that match a pattern."""

    pattern: str
    """Files, as in a `.gitignore`, by the names that the corpus gives them; the first source that matches counts."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        ignore_spec([pattern])
        return pattern


class MixedSource(SourcePattern):
    """The documents of some files, and how often they occur."""

    epochs: float | None = Field(default=None, ge=0, le=1000)
    """How often each training document of these files occurs, fractions allowed; `null` where `weight` is given."""
    weight: float | None = Field(default=None, gt=0)
    """Their share of the training text, relative to the weights of the others; give this or `epochs`, the same one for
    all."""

    @model_validator(mode="after")
    def _one_of_both(self) -> MixedSource:
        if (self.epochs is None) == (self.weight is None):
            raise ValueError("give either epochs (how often) or weight (which share of the text), not both")
        return self


class ScheduledSource(SourcePattern):
    """The documents of some files, and their weight over the steps of training."""

    weights: tuple[tuple[Annotated[int, Field(ge=0, le=MOST_STEPS)], Annotated[float, Field(ge=0)]], ...] = Field(
        min_length=1
    )
    """Points `[step, weight]` of a line, level before the first and after the last; a source's share of a step's
    rows is its weight over the sum of all."""

    @model_validator(mode="after")
    def _steps_grow(self) -> ScheduledSource:
        steps = [step for step, _ in self.weights]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"the steps of weights must increase, got {steps}")
        return self


class SourceNumbers:
    """Which of several sources a file belongs to: the first whose pattern matches its name, or none (-1)."""

    def __init__(self, sources: Sequence[SourcePattern]) -> None:
        self._specs = [ignore_spec([source.pattern]) for source in sources]

    def number(self, source: str) -> int:
        """The index of the first source whose pattern matches the file name, or -1."""
        return next((number for number, spec in enumerate(self._specs) if spec.match_file(source)), -1)


class Mixture(SourceNumbers):
    """The mixed sources of a corpus, and how often each occurs."""

    def __init__(self, sources: Sequence[MixedSource]) -> None:
        super().__init__(sources)
        self.sources = tuple(sources)

    def epochs(self, num_bytes: Sequence[int], others: int) -> list[float]:
        """How often each source occurs, given its bytes of training text and those of files that match none.

        Raises `DataError` for a source without text, and for text outside of all sources when weights are given.
        """
        for source, size in zip(self.sources, num_bytes, strict=True):
            if size == 0 and source.epochs != 0:
                raise DataError(
                    f"data.mix: no training text matches {source.pattern!r}. Patterns are compared with the file "
                    "names that 'sheepop data stats' shows, as in a .gitignore."
                )
        if all(source.weight is None for source in self.sources):
            return [source.epochs or 0.0 for source in self.sources]
        if others:
            raise DataError(
                f"data.mix: {others:,} bytes of text match no pattern, so the text cannot have the shares that the "
                "weights ask for. Add a source with the pattern '*' at the end, or give epochs instead of weights."
            )
        weights = [source.weight or 0.0 for source in self.sources]
        total, shares = sum(num_bytes), sum(weights)
        return [weight / shares * total / size for weight, size in zip(weights, num_bytes, strict=True)]


def copies(epochs: float, seed: int, document_id: str) -> int:
    """How often one document occurs: the whole part of `epochs`, and once more for the keyed share of its fraction."""
    whole = int(epochs)
    fraction = epochs - whole
    return whole + bool(fraction and derive_seed(seed, "mixture", document_id) / 2.0**63 < fraction)
