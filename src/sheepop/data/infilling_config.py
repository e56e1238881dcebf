"""The settings under ``data.infilling``: which code is re-ordered so that a model learns to fill a gap."""

from __future__ import annotations

from pydantic import Field

from sheepop.core.config import Config


class FimConfig(Config):
    """Fill-in-the-middle for documents of code (Bavarian et al. 2022)."""

    rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """The share of code documents that is reordered; 0 leaves all of them as they are."""
    spm_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    """Of these, the share in which the end comes before the beginning."""
