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
