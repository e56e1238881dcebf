"""How often the documents of each source occur, given as epochs or as shares of the training text.

A pattern over the printable file names selects the documents of a source. With `epochs`, every training document of
the source occurs that often; for a fraction, a keyed hash selects documents, the same ones in every build. With
`weight`, source i of size s_i occurs ``w_i / sum(w) * sum(s) / s_i`` times, which gives the requested shares and keeps
the total length. Held-out documents occur once, or not at all if `epochs` is 0.
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

MOST_STEPS = 10_000_000  # the schedule keeps a table with an entry for each step up to the last point


class SourcePattern(Config):
    """The documents of the files that match a pattern."""

    pattern: str
    """A `.gitignore` pattern for file names as the corpus lists them; a file belongs to the first source that
    matches."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        ignore_spec([pattern])
        return pattern


class MixedSource(SourcePattern):
    """The documents of some files, and how often they occur."""

    epochs: float | None = Field(default=None, ge=0, le=1000)
    """How often each training document of these files occurs, fractions allowed; `null` if `weight` is given."""
    weight: float | None = Field(default=None, gt=0)
    """Their share of the training text, relative to the other weights. All sources give `weight`, or all `epochs`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> MixedSource:
        if (self.epochs is None) == (self.weight is None):
            raise ValueError("give either epochs (how often) or weight (which share of the text), not both")
        return self


class ScheduledSource(SourcePattern):
    """The documents of some files, and their weight at each training step."""

    weights: tuple[tuple[Annotated[int, Field(ge=0, le=MOST_STEPS)], Annotated[float, Field(ge=0)]], ...] = Field(
        min_length=1
    )
    """Points `[step, weight]`, interpolated linearly, constant before the first and after the last. A source's share
    of a step's rows is its weight over the sum of all weights."""

    @model_validator(mode="after")
    def _steps_grow(self) -> ScheduledSource:
        steps = [step for step, _ in self.weights]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"the steps of weights must increase, got {steps}")
        return self


class SourceNumbers:
    """Maps file names to sources."""

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
        """How often each source occurs, given the training text of each (`num_bytes`) and of all `others` in bytes.

        Raises `DataError` for a source without text, and for text outside all sources if weights are given.
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
    """How often a document occurs: the integer part of `epochs`, and once more if a keyed hash is below the rest."""
    whole = int(epochs)
    fraction = epochs - whole
    return whole + bool(fraction and derive_seed(seed, "mixture", document_id) / 2.0**63 < fraction)
