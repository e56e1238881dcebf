"""Settings of generation that belong to a model and travel with it: the tokens that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json

GENERATION = "generation_config.json"


def read_generation(directory: Path) -> dict[str, Any]:
    """The keys of ``generation_config.json``, none when there is no such file."""
    if not (directory / GENERATION).is_file():
        return {}
    settings = read_json(directory / GENERATION)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{directory / GENERATION} is not a table of keys and values.")
    return settings


def end_ids(settings: Mapping[str, Any], vocab_size: int, where: str) -> tuple[int, ...]:
    """The tokens that end a text beside the tokenizer's own `eos_token`: a number, a list of numbers or nothing.

    A number outside the vocabulary ends nothing, since no model writes it. Raises `CheckpointError` for anything else.
    """
    value = settings.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{where}: eos_token_id = {str(value)[:80]} is neither a token id nor a list of them.")
    return tuple(token_id for token_id in dict.fromkeys(ids) if 0 <= token_id < vocab_size)
