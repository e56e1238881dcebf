"""Bytes of a network's weights, its cache and its training state, as functions of its configuration.

`sheepop.model.accounting.saved_activations` counts the activations that are kept for the backward pass.
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
    """The bytes that training needs regardless of the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    working_copy: int  # of the weights, in the data type of training steps
    average: int  # of the weights over the steps

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(getattr(self, field.name) for field in fields(self))


def training_bytes(config: ModelConfig, optimizer: str, precision: str, *, averaged: bool = False) -> TrainingBytes:
    """Returns the bytes of weights, gradients and optimizer state in float32, and with bf16 those of a working copy.

    `optimizer` is a value of `training.optimizer`, with its default settings; gradients are counted at the end of the
    backward pass, when all exist. Raises `ValueError` for an unknown optimizer.
    """
    if optimizer not in _STATE:
        raise ValueError(
            f"the state size of the optimizer {optimizer!r} is not known; known optimizers are {', '.join(_STATE)}"
        )
    shapes = parameter_shapes(config)
    tables = {name: shape for name, shape in shapes.items() if parameter_role(name, shape) == "table"}
    weights = _FLOAT32 * num_parameters(config)
    return TrainingBytes(
        weights=weights,
        # A table has gradients only for the few rows that a batch looks up.
        gradients=weights - sum(_one(name, shape) for name, shape in tables.items()),
        optimizer=sum(
            _FLOAT32 * shape[0] if name in tables else _STATE[optimizer](name, shape) for name, shape in shapes.items()
        ),
        # Embeddings are looked up in float32; the head, which may share their weight, is cast.
        working_copy=2 * (num_parameters(config) - _kept_exact(config)) if precision == "bf16" else 0,
        average=weights if averaged else 0,
    )


def cache_bytes(config: ModelConfig, rows: int, capacity: int, itemsize: int = _FLOAT32, source_len: int = 0) -> int:
    """Returns the bytes of keys and values for `rows` sequences of up to `capacity` tokens.

    An encoder-decoder also keeps those of its sources of `source_len` tokens. Recurrent states do not count.
    """
    return rows * (capacity + source_len) * cached_numbers(config) * itemsize


def cached_numbers(config: ModelConfig) -> int:
    """Returns how many numbers a cache holds for one token in all layers together."""
    cached = (config.cached_heads(layer) for layer in range(config.num_layers) if config.mixer(layer) is None)
    return sum(count * (key_width + value_width) for count, key_width, value_width in cached)


def pass_bytes(
    config: ModelConfig, num_tokens: int, num_keys: int, itemsize: int = _FLOAT32, *, scores: bool = False
) -> int:
    """Returns the bytes of activations of a pass without gradients over `num_tokens` tokens that see `num_keys`.

    They are those of the widest layer, without logits and without a cache. With `scores` its attention scores exist in
    memory; without them only a mask does.
    """
    heads, (kv_heads, key_width, value_width) = config.num_heads, config.widest_heads
    attention = 2 * (heads + kv_heads) * key_width + (2 * heads + kv_heads) * value_width
    experts = 1 if config.experts is None else config.experts.per_token
    delta = config.gated_delta_net
    # Inputs of the rule in float32, before and after the split into chunks.
    rule = 0 if delta is None else 8 * delta.num_value_heads * (2 * delta.key_head_dim + delta.value_head_dim)
    widest = max(config.layer_d_ff or (config.ffn_size,))
    widths = 4 * config.d_model + max(attention, rule, 3 * experts * widest)
    if config.layer_inputs is not None:
        widths += 3 * config.num_layers * config.layer_inputs.width
    # Keys and values that last layers share, of one layer of each kind.
    given = (config.heads(layer) for layer in range(config.num_layers) if config.gives_keys(layer))
    widths += sum(count * (key_width + value_width) for count, key_width, value_width in given)
    # Keys and values that latents of a cache become.
    expanded = 0 if config.latent_attention is None else heads * (config.head_size + config.value_size)
    masks = 1 + itemsize + (3 * heads * max(itemsize, _FLOAT32) if scores else 0)
    return num_tokens * (widths * itemsize + num_keys * masks) + (num_keys - num_tokens) * expanded * itemsize


def _kept_exact(config: ModelConfig) -> int:
    """Counts the numbers that stay in float32: routers, tables, and an embedding that the head does not share."""
    embedding = 0 if config.tie_weights else config.vocabulary * config.d_model
    exact = ("router", "table")
    found = parameter_shapes(config).items()
    return embedding + sum(math.prod(shape) for name, shape in found if parameter_role(name, shape) in exact)


def _moments(name: str, shape: Shape) -> int:
    """Two moments for each weight, and a step count for each tensor."""
    return _FLOAT32 * (2 * math.prod(shape) + 1)


def _one(name: str, shape: Shape) -> int:
    return _FLOAT32 * math.prod(shape)


def _muon(name: str, shape: Shape) -> int:
    inner = "blocks." in name and parameter_role(name, shape) != "vector"
    return _one(name, shape) if inner else _moments(name, shape)


# For each optimizer, the state bytes of a parameter with a given name and shape.
_STATE: dict[str, Callable[[str, Shape], int]] = {
    "adamw": _moments,
    "adam": _moments,
    "sgd": _one,
    "muon": _muon,
    "lion": _one,
    "adafactor": lambda name, shape: _FLOAT32 * sum(shape) if len(shape) == 2 else _one(name, shape),
    "schedule_free_adamw": lambda name, shape: 2 * _one(name, shape),
}
