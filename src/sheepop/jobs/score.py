"""Scores a text with a model from disk."""

from __future__ import annotations

from pathlib import Path

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.generate.scoring import Score, score_text


def score(model: str | Path, text: str, *, device: str = "auto", dtype: str | None = None) -> Score:
    """Loads the model that `model` means; how well it predicts `text`, token by token."""
    loaded = load_model(model, resolve_device(device), dtype_named(dtype))
    return score_text(loaded.model, loaded.tokenizer, text)
