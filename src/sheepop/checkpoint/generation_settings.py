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
    """The tokens that end a text beside the tokenizer's own `eos_token`: a number, a list of numbers or nothing."""
    value = settings.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{where}: eos_token_id = {str(value)[:80]} names a token outside the model's vocabulary of {vocab_size}."
            )
    return tuple(dict.fromkeys(ids))
