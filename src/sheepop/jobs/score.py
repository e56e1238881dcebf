"""Scores a text with a model from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sheepop.generate.likelihood import Score, score_text
from sheepop.jobs.generate import load_adapted


def score(
    model: str | Path,
    text: str,
    *,
    context: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    adapters: Sequence[str | Path] = (),
) -> Score:
    """Loads a model with `adapters` and scores how well it predicts `text`, token by token; see `score_text`."""
    loaded = load_adapted(model, adapters, device=device, dtype=dtype)
    return score_text(loaded.model, loaded.tokenizer, text, context=context)
