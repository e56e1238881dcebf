"""What native code is told about a layer, the tokens of a pass, and a step.

``block.cpp`` describes the fields, and ``experts.h`` those of a mixture of experts.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import Linear, StoredWeight
from sheepop.core.native import COUNT, NUMBER, POINTER, address
from sheepop.generate.paged_kernels import AttentionMetadata, Stored
from sheepop.model.attention.layer import Attention
from sheepop.model.block import Block
from sheepop.model.experts import Experts, MixtureOfExperts, Router
from sheepop.model.feedforward import FeedForward
from sheepop.model.norms import ZeroCenteredRMSNorm

Angles = tuple[Tensor, Tensor]
"""Cosines and sines."""
NORMS: dict[type[nn.Module], int] = {nn.LayerNorm: 1, nn.RMSNorm: 2, ZeroCenteredRMSNorm: 3}
"""The kinds of norms that native code knows."""
ACTIVATIONS = {
    "relu": 0,
    "relu_squared": 1,
    "gelu": 2,
    "geglu": 2,
    "gelu_tanh": 3,
    "geglu_tanh": 3,
    "swiglu": 4,
    "swiglu_clamped": 5,
}
"""The activations that native code knows."""
MODULES: frozenset[type[nn.Module]] = frozenset(
    {Block, Attention, FeedForward, MixtureOfExperts, Experts, Router, nn.Dropout, nn.Linear, *NORMS}
)
"""The modules that native code computes."""


class Norm(ctypes.Structure):
    """A norm of `width` numbers; kind 0 is none."""

    _fields_ = [("kind", COUNT), ("weight", POINTER), ("bias", POINTER), ("width", COUNT), ("eps", NUMBER)]


class Branch(ctypes.Structure):
    """The norms before and after a branch, and of the sum with the residual stream."""

    _fields_ = [(name, Norm) for name in ("before", "after", "sum")]


class ExpertsOfLayer(ctypes.Structure):
    """The weights and sizes of a mixture of experts."""

    _fields_ = [
        ("router", Linear),
        *((name, ctypes.POINTER(Linear)) for name in ("gate", "up", "down")),
        *((name, Norm) for name in ("router_norm", "routed_norm", "routed_output_norm", "shared_output_norm")),
        *((name, POINTER) for name in ("router_bias", "balance", "factors", "shared_gate")),
        *((name, COUNT) for name in ("count", "per_token", "groups", "groups_per_token", "group_top")),
        *((name, COUNT) for name in ("has_sigmoid", "normalizes")),
        *((name, NUMBER) for name in ("logit_scale", "scale")),
    ]


class Layer(ctypes.Structure):
    """The weights and sizes of a block."""

    _fields_ = [
        *((name, Branch) for name in ("attention", "feed_forward")),
        *((name, Norm) for name in ("query", "key")),
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, COUNT) for name in ("width", "heads", "kv_heads", "key_width", "value_width", "parallel")),
        ("activation", COUNT),
        *((name, NUMBER) for name in ("scale", "cap", "branch_scale")),
        *((name, POINTER) for name in ("slopes", "sinks")),
        ("experts", ctypes.POINTER(ExpertsOfLayer)),
    ]


class Change(ctypes.Structure):
    """What an adapter adds to a product."""

    _fields_ = [("down", POINTER), ("up", POINTER), ("rank", COUNT), ("scale", NUMBER)]


class Tokens(ctypes.Structure):
    """The tokens of a pass: where each is stored, the tiles in which they attend, and their rotary angles."""

    _fields_ = [
        *((name, COUNT) for name in ("count", "num_tiles", "block_size", "table_width", "window", "angles")),
        *((name, POINTER) for name in ("block", "offset", "table", "tiles", "cos", "sin")),
    ]


class Step(ctypes.Structure):
    """A layer and what it reads in a pass."""

    _fields_ = [
        *((name, POINTER) for name in ("layer", "tokens")),
        ("keys", Stored),
        ("values", Stored),
        ("changes", POINTER),
    ]


def described_linear(layer: nn.Linear | None) -> Linear:
    """Describes a product with the stored matrix of a layer; that of None is empty."""
    if layer is None:
        return Linear()
    assert isinstance(layer.weight, StoredWeight)
    return layer.weight.described(layer.bias)


def described_norm(norm: nn.Module | None) -> Norm:
    """Describes one of the `NORMS`; that of None is of kind 0."""
    if norm is None:
        return Norm()
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm | ZeroCenteredRMSNorm)
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    width = norm.weight.numel()
    weights = (address(name, x, torch.float32, width) for name, x in (("norm", norm.weight), ("norm", bias)))
    return Norm(NORMS[type(norm)], *weights, width, eps)


def described_layer(block: Block, activation: str, slopes: Tensor | None) -> Layer:
    """Describes a block of a network with this activation and, in ALiBi, `slopes` of heads.

    Raises `ValueError` if a layer has another size than the native code assumes.
    """
    attention, mixture = block.attention, block.feed_forward
    assert attention is not None and attention.k_proj is not None and attention.v_proj is not None
    # The shared experts of a mixture may have a norm of their own; so may the others, see `described_experts`.
    of_shared = mixture.shared_norm if isinstance(mixture, MixtureOfExperts) else None
    # If both branches share a norm, each of them computes it.
    of_network = of_shared or (block.attention_norm if block.shared_norm else block.feed_forward_norm)
    norms = (block.attention_norm, block.attention_output_norm), (of_network, block.feed_forward_output_norm)
    branches, is_last = [], block.position == "post"
    for norm, output_norm in norms:
        before, of_sum = (None, None if block.parallel else norm) if is_last else (norm, None)
        branches.append(Branch(*map(described_norm, (before, output_norm, of_sum))))
    width, value_width = attention.head_dim, attention.value_dim
    heads, kv_heads = (layer.out_features // width for layer in (attention.q_proj, attention.k_proj))
    _require_fit(block, heads, kv_heads)
    return Layer(
        *branches,
        *map(described_norm, (attention.q_norm, attention.k_norm)),
        *map(described_linear, linears(block)),
        attention.q_proj.in_features,
        *(heads, kv_heads, width, value_width),
        block.parallel,
        ACTIVATIONS[activation],
        width**-0.5 if attention.scale is None else attention.scale,
        attention.soft_cap or 0.0,
        block.residual_scale,
        *(address(name, x, torch.float32, heads) for name, x in (("slopes", slopes), ("sinks", attention.sinks))),
        ctypes.pointer(described_experts(mixture)) if isinstance(mixture, MixtureOfExperts) else None,
    )


def linears(block: Block) -> tuple[nn.Linear | None, ...]:
    """The layers with matrices that all rows pass, in the order of the native code."""
    attention, network = block.attention, dense(block)
    assert attention is not None
    of_network = () if network is None else (network.gate_proj, network.up_proj, network.down_proj)
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *(of_network or (None,) * 3)


def _require_fit(block: Block, heads: int, kv_heads: int) -> None:
    """Raises `ValueError` unless the layers of a block have the sizes that the native block assumes."""
    attention, network = block.attention, dense(block)
    assert attention is not None
    stream, width, value_width = attention.q_proj.in_features, attention.head_dim, attention.value_dim
    inner = 0 if network is None else network.up_proj.out_features
    assumed = {
        "q": (stream, heads * width),
        "k": (stream, kv_heads * width),
        "v": (stream, kv_heads * value_width),
        "o": (heads * value_width, stream),
        "gate": (stream, inner),
        "up": (stream, inner),
        "down": (inner, stream),
    }
    for layer, (name, (inputs, outputs)) in zip(linears(block), assumed.items(), strict=True):
        if layer is not None and (layer.in_features, layer.out_features) != (inputs, outputs):
            found = (layer.in_features, layer.out_features)
            raise ValueError(f"the projection {name} maps {found[0]} to {found[1]} numbers, not {inputs} to {outputs}")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} heads of keys and values")


def dense(block: Block) -> FeedForward | None:
    """The feed-forward network that all rows of a block pass: that of the shared experts in a mixture, or None."""
    return block.feed_forward.shared if isinstance(block.feed_forward, MixtureOfExperts) else block.feed_forward


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


_KINDS = 4  # of layers whose tokens are kept: with and without a window, with and without rotation


class TokensOfKind:
    """The tokens of a pass as native code sees them in the layers of a kind, with their own copy of the angles."""

    def __init__(self, metadata: AttentionMetadata, rotary: Angles | None, block_size: int, count: int) -> None:
        assert metadata.tiles is not None
        self.rotary = rotary
        self.width = 0 if rotary is None else rotary[0].shape[-1]
        self._angles = [] if rotary is None else [part.clone(memory_format=torch.contiguous_format) for part in rotary]
        self.described = Tokens(
            *(count, len(metadata.tiles), block_size, metadata.block_table.shape[-1], metadata.window or 0, self.width),
            *(address("slots", part, torch.int64, count) for part in metadata.slot_mapping),
            *metadata.addresses(),
            *(address("angles", part.view(-1, self.width), torch.float32, count, self.width) for part in self._angles),
        )

    def move(self, rotary: Angles | None) -> None:
        """Takes the angles of the next pass over the same metadata."""
        if self.rotary is not rotary:
            for mine, new in zip(self._angles, rotary or (), strict=True):
                mine.copy_(new)
            self.rotary = rotary


def tokens_of(metadata: AttentionMetadata, rotary: Angles | None, block_size: int, count: int) -> TokensOfKind:
    """Describes the `count` tokens of a pass, once for all layers of a kind.

    Raises `ValueError` if a tensor is not as the native code assumes.
    """
    for known in metadata.described:
        if known.rotary is rotary:
            return known
    made = TokensOfKind(metadata, rotary, block_size, count)
    del metadata.described[: 1 - _KINDS]
    metadata.described.append(made)
    return made
