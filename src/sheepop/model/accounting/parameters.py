"""Parameter counts of a network, as functions of its configuration: all, active for a token, and in products."""

from __future__ import annotations

import math

import torch

from sheepop.model.config import ModelConfig
from sheepop.model.initialization import blank_model
from sheepop.model.options import GATED

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shapes of all trained tensors by name, tied ones once; needs a known vocabulary size."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in blank_model(config).named_parameters()}


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of trained parameters, tied ones once; needs a known vocabulary size."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters that one token uses.

    They include the experts chosen for it in each layer, and one row of each n-gram table.
    """
    total = num_parameters(config)
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
    queries, _ = attention_weights(config)
    layers = sum(
        mixer_weights(config, layer) + feed_forward_weights(config, layer) for layer in range(config.num_layers)
    )
    across = config.num_layers * queries if config.architecture == "encoder_decoder" else 0
    return layers + across + config.d_model * config.vocabulary


def mixer_weights(config: ModelConfig, layer: int) -> int:
    """Returns the number of weights that multiply a token in a layer's attention, or in what it has instead."""
    mixer, width = config.mixer(layer), config.d_model
    if mixer == "gated_convolution":
        return 4 * width**2
    if mixer == "gated_delta_net" and (delta := config.gated_delta_net) is not None:
        return width * (2 * delta.key_width + 3 * delta.value_width + 2 * delta.num_value_heads)
    return sum(attention_weights(config))


def attention_weights(config: ModelConfig) -> tuple[int, int]:
    """Returns how many weights multiply a query token (queries and output), and how many a key token (keys, values)."""
    heads, latent = config.num_heads, config.latent_attention
    gates = config.value_size if config.attention_output_gate else 0
    queries = config.d_model * heads * (config.head_size + config.value_size + gates)
    if latent is not None:
        if latent.q_rank is not None:
            into = config.d_model + heads * config.head_size
            queries += latent.q_rank * into - config.d_model * heads * config.head_size
        widths = config.head_size - latent.rope_head_dim + config.value_size
        return queries, config.d_model * (latent.rope_head_dim + latent.kv_rank) + latent.kv_rank * heads * widths
    return queries, config.d_model * config.kv_heads * (config.head_size + config.value_size)


def feed_forward_weights(config: ModelConfig, layer: int) -> int:
    """Returns the number of weights of a layer's feed-forward network that multiply a token, router included."""
    matrices = (3 if config.activation in GATED else 2) * config.d_model
    experts = config.experts if config.has_experts(layer) else None
    if experts is None:
        return matrices * config.ffn_size
    used = experts.per_token + experts.shared
    routers = experts.count + experts.shared_gate
    return matrices * used * (experts.d_ff or config.ffn_size) + routers * config.d_model
