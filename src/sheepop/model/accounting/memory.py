"""Bytes of a network, as a function of its configuration: its weights, its cache, and what training holds.

What a forward pass keeps for the backward pass is counted in `sheepop.model.accounting.saved_activations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from sheepop.model.accounting.parameters import Shape, num_parameters, parameter_shapes
from sheepop.model.config import ModelConfig
from sheepop.model.initialization import parameter_role

_FLOAT32 = 4


@dataclass(frozen=True)
class TrainingBytes:
    """What training holds all the time, whatever the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    working_copy: int  # of the weights, in the data type that steps compute in
    average: int  # of the weights over the steps

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def training_bytes(config: ModelConfig, optimizer: str, precision: str, *, averaged: bool = False) -> TrainingBytes:
    """Of weights, gradients and state in float32, and in bf16 of the copy that steps compute with.

    `optimizer` is one of those of `training.optimizer`, with its customary settings; gradients are counted when all of
    them are there, at the end of the backward pass. Raises `ValueError` for an optimizer that is not known.
    """
    if optimizer not in _STATE:
        raise ValueError(
            f"the state of the optimizer {optimizer!r} is not known; the known ones are those of {', '.join(_STATE)}"
        )
    shapes = parameter_shapes(config)
    tables = {name: shape for name, shape in shapes.items() if parameter_role(name, shape) == "table"}
    weights = weight_bytes(config)
    return TrainingBytes(
        weights=weights,
        # Of a table the rows that a batch looks up, which are few.
        gradients=weights - sum(_one(name, shape) for name, shape in tables.items()),
        optimizer=sum(
            _FLOAT32 * shape[0] if name in tables else _STATE[optimizer](name, shape) for name, shape in shapes.items()
        ),
        # Embeddings are looked up in float32; the head, which may be the same weight, is cast.
        working_copy=2 * (num_parameters(config) - _kept_exact(config)) if precision == "bf16" else 0,
        average=weights if averaged else 0,
    )


def weight_bytes(config: ModelConfig, itemsize: int = _FLOAT32) -> int:
    """Of all parameters, tied ones once, with `itemsize` bytes for a number."""
    return itemsize * num_parameters(config)


def cache_bytes(config: ModelConfig, rows: int, capacity: int, itemsize: int = _FLOAT32, source_len: int = 0) -> int:
    """Of the keys and values of `rows` sequences of up to `capacity` tokens.

    An encoder-decoder keeps those of its sources of `source_len` tokens as well.
    """
    per_token = config.num_layers * config.kv_heads * (config.head_size + config.value_size) * itemsize
    return rows * (capacity + source_len) * per_token


def _kept_exact(config: ModelConfig) -> int:
    """Numbers of the routers, of tables, and of an embedding that nothing else uses."""
    embedding = 0 if config.tie_weights else config.vocabulary * config.d_model
    exact = ("router", "table")
    found = parameter_shapes(config).items()
    return embedding + sum(math.prod(shape) for name, shape in found if parameter_role(name, shape) in exact)


def _moments(name: str, shape: Shape) -> int:
    """Two for every weight, and the number of steps, of every tensor."""
    return _FLOAT32 * (2 * math.prod(shape) + 1)


def _one(name: str, shape: Shape) -> int:
    return _FLOAT32 * math.prod(shape)


def _two(name: str, shape: Shape) -> int:
    return 2 * _one(name, shape)


def _muon(name: str, shape: Shape) -> int:
    inner = "blocks." in name and parameter_role(name, shape) != "vector"
    return _one(name, shape) if inner else _moments(name, shape)


def _adafactor(name: str, shape: Shape) -> int:
    return _FLOAT32 * sum(shape) if len(shape) == 2 else _one(name, shape)


# The bytes of an optimizer's state for a parameter of this name and shape.
_STATE: dict[str, Callable[[str, Shape], int]] = {
    "adamw": _moments,
    "adam": _moments,
    "sgd": _one,
    "muon": _muon,
    "lion": _one,
    "adafactor": _adafactor,
    "schedule_free_adamw": _two,
}
