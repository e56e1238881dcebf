"""Floating-point operations of a network, as a function of its configuration.

They are those of matrix products, two for each multiplication: projections, experts, scores and weighted sums. Norms,
activations and the softmax, which are not a hundredth of them, are left out, and so is what a kernel computes beyond
what the network asks for, such as scores that a mask removes.
"""

from __future__ import annotations

from sheepop.model.accounting.parameters import attention_weights, feed_forward_weights, matrix_parameters
from sheepop.model.config import ModelConfig


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
    queries, keys = attention_weights(config)
    weights = layers * (queries + keys + feed_forward_weights(config, 0)) + config.num_layers * keys
    pairs = layers * source_len**2 + config.num_layers * seq_len * source_len
    return 2 * source_len * weights + pairs * _operations_per_key(config)
