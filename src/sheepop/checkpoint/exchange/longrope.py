"""LongRoPE in a foreign ``config.json``: two tables of factors, one for short texts and one for long ones.

transformers takes the table by the length of the whole text, so that the angles of every earlier key change when a text
grows beyond the original context. SheepOp's network has one table: it reads that of short texts, with which the two
compute the same up to the original context, and ends texts there.
"""

from __future__ import annotations

from typing import Any

from sheepop.checkpoint.exchange.given import LARGEST_CONTEXT, Given
from sheepop.model.config import ModelConfig

ORIGINAL = "original_max_position_embeddings"
_SHORT, _LONG = "short_factor", "long_factor"


def read_longrope(given: Given, outside: int | None, max_seq_len: int) -> dict[str, Any]:
    """The scaling, and the length of texts for which it holds; `outside` is what stands beside the table."""
    original = given.typed(ORIGINAL, int, outside, optional=True, largest=LARGEST_CONTEXT)
    if original is None or original < 2:
        raise given.problem(ORIGINAL, "is no length, without which longrope cannot be read")
    if outside not in (None, original):
        raise given.problem(ORIGINAL, f"contradicts the {outside} that stands outside of this table")
    factor = given.typed("factor", float, None, optional=True)
    short, long = _factors(given, _SHORT), _factors(given, _LONG)
    scaling = {
        "kind": "longrope",
        "factor": max(1.0, max_seq_len / original) if factor is None else factor,
        "original_max_seq_len": original,
        "attention_factor": given.typed("attention_factor", float, None, optional=True),
        "pair_factors": tuple(short),
    }
    return {"rotary_scaling": scaling, "max_seq_len": max_seq_len if short == long else min(max_seq_len, original)}


def written_longrope(config: ModelConfig) -> dict[str, Any]:
    """The table; both lists of factors are the one that the network has."""
    scaling = config.rotary_scaling
    assert scaling is not None and scaling.pair_factors is not None
    return {
        "factor": scaling.factor,
        ORIGINAL: scaling.original_max_seq_len,
        "attention_factor": scaling.attention_factor,
        _SHORT: list(scaling.pair_factors),
        _LONG: list(scaling.pair_factors),
    }


def longrope_note(config: ModelConfig, given: Any) -> list[str]:
    """What the user should know of a model whose longer texts are left out; `given` is what the source allows."""
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind != "longrope" or not isinstance(given, int) or given <= config.max_seq_len:
        return []
    return [
        f"The model has other rotary angles for texts beyond {config.max_seq_len} tokens (longrope), which SheepOp "
        f"does not compute: it is taken in for texts up to that length, not the {given} of the source."
    ]


def _factors(given: Given, name: str) -> list[float]:
    values = given.take(name, None)
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not isinstance(values, list) or not values or not numbers:
        raise given.problem(name, "is not a list of numbers")
    return [float(value) for value in values]
