"""The settings under ``data.clean.near_duplicates``: which documents are near duplicates, and how they are found."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config

# The smallest share of pairs exactly at the threshold that must become candidates.
_LEAST_FOUND = 0.9
_USUAL_PERMUTATIONS = 128
_MOST_PERMUTATIONS = 4096


def share_found(similarity: float, bands: int, rows: int) -> float:
    """The share of pairs of this similarity with an equal band (Leskovec et al., Mining of Massive Datasets, 3.4.2)."""
    return float(1.0 - (1.0 - similarity**rows) ** bands)


class NearDuplicatesConfig(Config):
    """When a document is a near duplicate, and the parameters of the search.

    Documents are compared by their sets of shingles. MinHash signatures of `bands` times `rows` minima find the pairs
    to compare. Documents of the corpora `against` are never removed.
    """

    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    """The smallest Jaccard similarity of shingles at which a document is a near duplicate."""
    shingle_words: int = Field(default=5, ge=1, le=64)
    """Consecutive words in a shingle."""
    min_words: int = Field(default=1, ge=1)
    """Documents with fewer words are not compared."""
    bands: int = Field(default=16, ge=1, le=1024)
    """Bands in a signature; documents that agree in a whole band are compared."""
    rows: int = Field(default=7, ge=1, le=64)
    """Minima in a band. Bands and rows that would miss more than a tenth of the pairs at the threshold are refused."""
    against: tuple[str, ...] = ()
    """Finished corpora whose documents must not occur in this one."""

    @field_validator("against")
    @classmethod
    def _usable_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if any(not path.strip() or "\0" in path for path in paths):
            raise ValueError(
                "a path is empty or contains a NUL character; give corpus directories, or leave the list out"
            )
        if len(set(paths)) != len(paths):
            raise ValueError("a corpus is listed twice; name each one once")
        return paths

    @model_validator(mode="after")
    def _bands_find_what_the_threshold_asks(self) -> NearDuplicatesConfig:
        if self.bands * self.rows > _MOST_PERMUTATIONS:
            raise ValueError(
                f"bands * rows = {self.bands * self.rows} is more than {_MOST_PERMUTATIONS} minima for each document; "
                f"lower one of them ({_USUAL_PERMUTATIONS} in all is usual)"
            )
        found = share_found(self.threshold, self.bands, self.rows)
        if found < _LEAST_FOUND:
            bands, rows = _fitting(self.threshold)
            raise ValueError(
                f"with bands = {self.bands} and rows = {self.rows}, only {found:.1%} of the pairs whose similarity is "
                f"threshold = {self.threshold} would be found. Take bands = {bands} and rows = {rows}, which find "
                f"{share_found(self.threshold, bands, rows):.1%}"
            )
        return self


def _fitting(threshold: float) -> tuple[int, int]:
    """The bands and rows that find 95% at the threshold with the usual number of minima, or the fewest that suffice."""
    for rows in range(16, 0, -1):
        bands = _USUAL_PERMUTATIONS // rows
        if share_found(threshold, bands, rows) >= 0.95:
            return bands, rows
    return next((bands for bands in (128, 256, 512) if share_found(threshold, bands, 1) >= _LEAST_FOUND), 1024), 1
