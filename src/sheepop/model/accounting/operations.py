"""Floating-point operations of a network, as functions of its configuration.

Only matrix products count, with two operations for each multiplication: projections, experts, scores and weighted sums.
Norms, activations and the softmax, less than a hundredth of them, are left out, and so is work that a kernel wastes,
such as scores that a mask removes.
"""

from __future__ import annotations

from sheepop.model.accounting.parameters import attention_weights, feed_forward_weights, matrix_parameters
from sheepop.model.config import ModelConfig


def forward_flops_per_token(config: ModelConfig, seq_len: int, source_len: int | None = None) -> float:
    """Returns the forward operations per token, averaged over a causal sequence of `seq_len` tokens.

    Two per weight, and two products for each head and key that the token sees, its own included, which sliding windows
    limit. For an encoder-decoder it is per target token, with its share of encoding a source of `source_len` tokens
    (`seq_len` if None).
    """
    of_keys = sum(
        _keys_seen(seq_len, config.window(layer)) * _operations_per_key(config, layer) for layer in _attending(config)
    )
    of_token = 2 * matrix_parameters(config) + of_keys / seq_len + _operations_of_states(config)
    of_sequence = seq_len * of_token
    if config.architecture == "encoder_decoder":
        of_sequence += _source_flops(config, seq_len, seq_len if source_len is None else source_len)
    return of_sequence / seq_len


def decoding_flops_per_token(config: ModelConfig, context: float, source_len: float = 0) -> float:
    """Returns the operations to generate one token with the cache, with `context` keys, its own included.

    In an encoder-decoder it also attends to a source of `source_len` tokens, whose keys and values are cached.
    """
    of_keys, latent = 0.0, config.latent_attention
    for layer in _attending(config):
        window, per_key = config.window(layer), _operations_per_key(config, layer)
        if latent is not None:  # queries attend to the latents themselves
            per_key = 2 * config.num_heads * (latent.rope_head_dim + 2 * latent.kv_rank)
        of_keys += (source_len + (context if window is None else min(context, window))) * per_key
    return 2 * matrix_parameters(config) + of_keys + _operations_of_states(config)


def training_flops_per_token(config: ModelConfig, seq_len: int, source_len: int | None = None) -> float:
    """Returns the operations per token of forward and backward (twice the forward), without recomputation."""
    return 3 * forward_flops_per_token(config, seq_len, source_len)


def step_flops(config: ModelConfig, seq_len: int, tokens: int, labels: int, trained: int | None = None) -> float:
    """Returns the operations of a training step over rows of `seq_len` tokens, `tokens` of them in all.

    The output matrix multiplies only the tokens with `labels`. If the network is frozen below adapters with `trained`
    weights, no gradients of its own weights are computed.
    """
    of_head = 2 * config.d_model * config.vocabulary
    forward = tokens * (forward_flops_per_token(config, seq_len) - of_head) + labels * of_head
    if trained is None:
        return 3 * forward
    of_weights = tokens * (2 * matrix_parameters(config) - of_head) + labels * of_head
    return 3 * forward - of_weights + 6 * tokens * trained


def _operations_per_key(config: ModelConfig, layer: int) -> int:
    """Returns the operations of `layer` per query and key: a score and a weighted value for each head."""
    _, key_width, value_width = config.heads(layer)
    return 2 * config.num_heads * (key_width + value_width)


def _operations_of_states(config: ModelConfig) -> int:
    """Returns the operations of all recurrent layers per token: a state is read by the key, written, and read again."""
    delta = config.gated_delta_net
    return 0 if delta is None else len(delta.layers) * 6 * delta.state_size


def _attending(config: ModelConfig) -> list[int]:
    """Returns the layers with attention."""
    return [layer for layer in range(config.num_layers) if config.mixer(layer) is None]


def _keys_seen(seq_len: int, window: int | None) -> int:
    """Returns the keys that all queries of a causal sequence see: ``sum_t min(t, window)`` for t from 1 to T."""
    limit = seq_len if window is None else min(window, seq_len)
    return limit * (limit + 1) // 2 + (seq_len - limit) * limit


def _source_flops(config: ModelConfig, seq_len: int, source_len: int) -> float:
    """Returns the operations of encoding a source, and of cross-attention to it from `seq_len` targets."""
    layers = config.num_encoder_layers or config.num_layers
    queries, keys = attention_weights(config, 0)
    weights = layers * (queries + keys + feed_forward_weights(config, 0)) + config.num_layers * keys
    pairs = layers * source_len**2 + config.num_layers * seq_len * source_len
    return 2 * source_len * weights + pairs * _operations_per_key(config, 0)
