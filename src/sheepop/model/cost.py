"""What a network costs, as a function of its configuration: parameters, floating-point operations, bytes.

Operations are those of matrix products, two for each multiplication: projections, experts, scores and weighted sums.
Norms, activations and the softmax, which are not a hundredth of them, are left out, and so is what a kernel computes
beyond what the network asks for, such as scores that a mask removes. Bytes of activations are counted in
`sheepop.model.activations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from sheepop.model.architectures import blank_model
from sheepop.model.config import GATED, ModelConfig
from sheepop.model.parameter_role import parameter_role

_FLOAT32 = 4
Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every trained tensor by its name, tied ones once; needs a known vocabulary."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in blank_model(config).named_parameters()}


def num_parameters(config: ModelConfig) -> int:
    """Trained numbers, tied ones once; needs a known vocabulary."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Those that take part in the computation of one token: of the experts of a layer only the ones it is sent to."""
    total = num_parameters(config)
    if config.experts is None:
        return total
    stacked = sum(math.prod(shape) for name, shape in parameter_shapes(config).items() if ".experts." in name)
    return total - stacked // config.experts.count * (config.experts.count - config.experts.per_token)


def matrix_parameters(config: ModelConfig) -> int:
    """Weights that multiply every token: projections, feed-forward, the experts of a token, routers and output head.

    No look-up, no vectors. Of an encoder-decoder those that multiply a target token.
    """
    queries, keys = _attention_weights(config)
    layers = sum(queries + keys + _feed_forward_weights(config, layer) for layer in range(config.num_layers))
    across = config.num_layers * queries if config.architecture == "encoder_decoder" else 0
    return layers + across + config.d_model * config.vocabulary


def _attention_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights that multiply a token that asks (queries and output), and one that is asked (keys and values)."""
    queries = config.d_model * config.num_heads * (config.head_size + config.value_size)
    return queries, config.d_model * config.kv_heads * (config.head_size + config.value_size)


def _feed_forward_weights(config: ModelConfig, layer: int) -> int:
    matrices = (3 if config.activation in GATED else 2) * config.d_model
    experts = config.experts if config.has_experts(layer) else None
    if experts is None:
        return matrices * config.ffn_size
    used = experts.per_token + experts.shared
    return matrices * used * (experts.d_ff or config.ffn_size) + experts.count * config.d_model


def forward_flops_per_token(config: ModelConfig, seq_len: int, source_len: int | None = None) -> float:
    """Operations of one token's forward pass, in the mean over causal sequences of `seq_len` tokens.

    Two per weight, and two products for each head and key that the token sees, itself included, which sliding windows
    limit. Of an encoder-decoder: of one target token, with its share of a source of `source_len` tokens (`seq_len`
    when None), which the encoder reads.
    """
    seen = sum(_keys_seen(seq_len, config.window(layer)) for layer in range(config.num_layers)) / seq_len
    of_sequence = seq_len * (2 * matrix_parameters(config) + seen * _operations_per_key(config))
    if config.architecture == "encoder_decoder":
        of_sequence += _source_flops(config, seq_len, seq_len if source_len is None else source_len)
    return of_sequence / seq_len


def decoding_flops_per_token(config: ModelConfig, context: float, source_len: float = 0) -> float:
    """Operations of a token that is generated with the cache, and sees `context` keys, itself included.

    In an encoder-decoder it looks at a source of `source_len` tokens as well, whose keys and values are there.
    """
    windows = (config.window(layer) for layer in range(config.num_layers))
    seen = sum(source_len + (context if window is None else min(context, window)) for window in windows)
    return 2 * matrix_parameters(config) + seen * _operations_per_key(config)


def training_flops_per_token(config: ModelConfig, seq_len: int, source_len: int | None = None) -> float:
    """Forward and backward (twice the forward) of one token in causal sequences of `seq_len`, nothing recomputed."""
    return 3 * forward_flops_per_token(config, seq_len, source_len)


def _operations_per_key(config: ModelConfig) -> int:
    """Of one layer: a score, and a value times its weight, for every head."""
    return 2 * config.num_heads * (config.head_size + config.value_size)


def _keys_seen(seq_len: int, window: int | None) -> int:
    """Keys that the queries of a causal sequence see together: ``sum_t min(t, window)`` for t from 1 to T."""
    limit = seq_len if window is None else min(window, seq_len)
    return limit * (limit + 1) // 2 + (seq_len - limit) * limit


def _source_flops(config: ModelConfig, seq_len: int, source_len: int) -> float:
    """Of an encoder over a source, and of the decoder's look at it from `seq_len` targets."""
    layers = config.num_encoder_layers or config.num_layers
    queries, keys = _attention_weights(config)
    weights = layers * (queries + keys + _feed_forward_weights(config, 0)) + config.num_layers * keys
    pairs = layers * source_len**2 + config.num_layers * seq_len * source_len
    return 2 * source_len * weights + pairs * _operations_per_key(config)


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
        raise ValueError(f"the state of the optimizer {optimizer!r} is not known; known are {', '.join(_STATE)}")
    shapes = parameter_shapes(config)
    weights = weight_bytes(config)
    return TrainingBytes(
        weights=weights,
        gradients=weights,
        optimizer=sum(_STATE[optimizer](name, shape) for name, shape in shapes.items()),
        # Embeddings are looked up in float32; the head, which may be the same weight, is cast. Routers are exact.
        working_copy=2 * (num_parameters(config) - _looked_up(config) - _routing(config)) if precision == "bf16" else 0,
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


def _looked_up(config: ModelConfig) -> int:
    """Numbers of the embedding that nothing else uses."""
    return 0 if config.tie_weights else config.vocabulary * config.d_model


def _routing(config: ModelConfig) -> int:
    """Numbers of all routers."""
    return sum(math.prod(shape) for name, shape in parameter_shapes(config).items() if ".router." in name)


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
