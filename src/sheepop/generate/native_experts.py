"""What native code is told about a mixture of experts; ``experts.h`` computes it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import Linear, StoredWeight
from sheepop.core.native import address
from sheepop.generate.native_steps import ExpertsOfLayer, described_norm
from sheepop.model.block import Block
from sheepop.model.experts import Experts, MixtureOfExperts, Router
from sheepop.model.feedforward import FeedForward

MODULES: frozenset[type[nn.Module]] = frozenset({MixtureOfExperts, Experts, Router})
"""The modules that it computes, apart from linear layers and norms."""


def dense(block: Block) -> FeedForward | None:
    """The feed-forward network that all rows of a block pass: that of the shared experts in a mixture, or None."""
    return block.feed_forward.shared if isinstance(block.feed_forward, MixtureOfExperts) else block.feed_forward


def input_norm(block: Block) -> nn.Module | None:
    """The norm of the input of `dense`, and of the experts unless they have norms of their own.

    If both branches share a norm, each of them computes it.
    """
    mixture = block.feed_forward
    own = mixture.shared_norm if isinstance(mixture, MixtureOfExperts) else None
    return own or (block.attention_norm if block.shared_norm else block.feed_forward_norm)


def matrices(block: Block) -> Iterator[Tensor]:
    """Yields the weights of the router and of the experts of a block."""
    if isinstance(mixture := block.feed_forward, MixtureOfExperts):
        experts = mixture.experts
        every = (mixture.router.weight, experts.gate_proj, experts.up_proj, experts.down_proj)
        yield from (weight for weight in every if weight is not None)


def described_experts(mixture: MixtureOfExperts) -> ExpertsOfLayer:
    """Describes a mixture whose matrices are stored weights; it points to their memory and to that of other weights.

    Raises `ValueError` if a weight has another shape than the native code assumes.
    """
    router, experts = mixture.router, mixture.experts
    count, inner, width = experts.up_proj.shape
    assert isinstance(router.weight, StoredWeight)
    if router.weight.shape != (count, width):
        raise ValueError(f"the router maps to {tuple(router.weight.shape)}, not to {count} experts of {width} numbers")
    return ExpertsOfLayer(
        router.weight.described(None),
        _of_each("gate", experts.gate_proj, experts.gate_bias, (count, inner, width)),
        _of_each("up", experts.up_proj, experts.up_bias, (count, inner, width)),
        _of_each("down", experts.down_proj, experts.down_bias, (count, width, inner)),
        *map(described_norm, (mixture.router_norm, mixture.routed_norm)),
        *map(described_norm, (mixture.routed_output_norm, mixture.shared_output_norm)),
        address("the router's bias", router.bias, torch.float32, count),
        address("the balance of experts", router.balance, torch.float32, count),
        address("the factors of experts", router.expert_scale, torch.float32, count),
        address("the gate of shared experts", mixture.shared_gate, torch.float32, 1, width),
        *(count, router.per_token, router.groups, router.groups_per_token, router.group_top),
        *(router.scores == "sigmoid", router.normalize, router.logit_scale, router.scale),
    )


def _of_each(
    name: str, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, int, int]
) -> ctypes.Array[Linear] | None:
    """Describes the products with the matrices of all experts, one after another."""
    if weight is None:
        return None
    assert isinstance(weight, StoredWeight)
    if weight.shape != shape:
        raise ValueError(f"the projection {name} of the experts has the shape {tuple(weight.shape)}, not {shape}")
    every = (weight.of_expert(expert).described(None if bias is None else bias[expert]) for expert in range(shape[0]))
    return (Linear * shape[0])(*every)
