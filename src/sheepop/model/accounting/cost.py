"""Parameters, floating-point operations and bytes of a network, as functions of its configuration.

Of operations only matrix products count, with two operations for each multiplication: projections, experts, scores and
weighted sums. Norms, activations and the softmax, less than a hundredth of them, are left out, and so is work that a
kernel wastes, such as scores that a mask removes. `sheepop.model.accounting.saved_activations` counts the activations
that are kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from sheepop.model.config import ModelConfig
from sheepop.model.initialization import blank_model, parameter_role
from sheepop.model.options import GATED

Shape = tuple[int, ...]
_FLOAT32 = 4


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shapes of all trained tensors by name, tied ones once; needs a known vocabulary size."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in blank_model(config).named_parameters()}


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of trained parameters, tied ones once; needs a known vocabulary size."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters that one token uses.

    They include the experts chosen for it in each layer, and one row of each table of n-grams or of layer inputs.
    """
    total = num_parameters(config)
    if config.layer_inputs is not None:
        total -= (config.vocabulary - 1) * config.num_layers * config.layer_inputs.width
    if config.ngrams is not None:
        total -= len(config.ngrams.orders) * (config.ngrams.rows - 1) * config.d_model
    if config.experts is None:
        return total
    stacked = sum(math.prod(shape) for name, shape in parameter_shapes(config).items() if ".experts." in name)
    return total - stacked // config.experts.count * (config.experts.count - config.experts.per_token)


def matrix_parameters(config: ModelConfig) -> int:
    """Returns the number of weights that multiply a token: projections, feed-forward, its experts, routers, head.

    Look-ups and vectors do not count. For an encoder-decoder these are the weights that multiply a target token.
    """
    queries, _ = attention_weights(config, 0)
    layers = sum(
        mixer_weights(config, layer) + feed_forward_weights(config, layer) for layer in range(config.num_layers)
    )
    if config.layer_inputs is not None:  # their projection, and two matrices in each layer
        layers += 3 * config.num_layers * config.d_model * config.layer_inputs.width
    across = config.num_layers * queries if config.architecture == "encoder_decoder" else 0
    return layers + across + config.d_model * config.vocabulary


def mixer_weights(config: ModelConfig, layer: int) -> int:
    """Returns the number of weights that multiply a token in a layer's attention, or in what it has instead."""
    mixer, width = config.mixer(layer), config.d_model
    if mixer == "gated_convolution":
        return 4 * width**2
    if mixer == "gated_delta_net" and (delta := config.gated_delta_net) is not None:
        return width * (2 * delta.key_width + 3 * delta.value_width + 2 * delta.num_value_heads)
    return sum(attention_weights(config, layer))


def attention_weights(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Returns how many weights multiply a query token (queries and output), and how many a key token (keys, values)."""
    heads, latent, (kv_heads, key_width, value_width) = config.num_heads, config.latent_attention, config.heads(layer)
    gates = value_width if config.attention_output_gate else 0
    queries = config.d_model * heads * (key_width + value_width + gates)
    if latent is not None:
        if latent.q_rank is not None:
            queries += latent.q_rank * (config.d_model + heads * key_width) - config.d_model * heads * key_width
        widths = key_width - latent.rope_head_dim + value_width
        return queries, config.d_model * (latent.rope_head_dim + latent.kv_rank) + latent.kv_rank * heads * widths
    if config.kv_source(layer) != layer:
        return queries, 0
    own_values = 0 if layer in (config.keys_as_values or ()) else value_width
    return queries, config.d_model * kv_heads * (key_width + own_values)


def feed_forward_weights(config: ModelConfig, layer: int) -> int:
    """Returns the number of weights of a layer's feed-forward network that multiply a token, router included."""
    matrices = (3 if config.activation in GATED else 2) * config.d_model
    experts = config.experts if config.has_experts(layer) else None
    if experts is None:
        return matrices * config.ffn_width(layer)
    used = experts.per_token + experts.shared
    routers = experts.count + experts.shared_gate
    return matrices * used * (experts.d_ff or config.ffn_size) + routers * config.d_model


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
