"""Generation settings that are stored with a model: the tokens that end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json

GENERATION = "generation_config.json"


def read_generation(directory: Path) -> dict[str, Any]:
    """Returns the keys of ``generation_config.json``, empty if there is no such file."""
    if not (directory / GENERATION).is_file():
        return {}
    settings = read_json(directory / GENERATION)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{directory / GENERATION} is not a table of keys and values.")
    return settings


def end_ids(settings: Mapping[str, Any], vocab_size: int, where: str) -> tuple[int, ...]:
    """Returns the tokens that end a text in addition to the tokenizer's `eos_token`.

    `eos_token_id` is a number, a list of numbers or absent; `CheckpointError` is raised for anything else. Numbers
    outside the vocabulary are ignored, since no model generates them.
    """
    value = settings.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{where}: eos_token_id = {str(value)[:80]} is neither a token id nor a list of them.")
    return tuple(token_id for token_id in dict.fromkeys(ids) if 0 <= token_id < vocab_size)


def with_ends(settings: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """The settings in which the tokens `ids` end a text, too."""
    value = settings.get("eos_token_id")
    known = [] if value is None else value if isinstance(value, list) else [value]
    return {**settings, "eos_token_id": list(dict.fromkeys([*known, *ids]))} if ids else dict(settings)
