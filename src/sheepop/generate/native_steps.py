"""What native code is told about a layer, the tokens of a pass, and a step; ``block.cpp`` describes the fields."""

from __future__ import annotations

import ctypes
from collections import deque

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import Linear, StoredWeight
from sheepop.core.native import address
from sheepop.generate.paged_kernels import AttentionMetadata
from sheepop.model.norms import ZeroCenteredRMSNorm

Angles = tuple[Tensor, Tensor]
"""Cosines and sines."""
_KINDS = 4  # of layers whose tokens are kept: with and without a window, with and without rotation
NORMS: dict[type[nn.Module], int] = {nn.LayerNorm: 1, nn.RMSNorm: 2, ZeroCenteredRMSNorm: 3}
"""The kinds of norms that native code knows."""
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Norm(ctypes.Structure):
    """A norm of `width` numbers; kind 0 is none."""

    _fields_ = [("kind", COUNT), ("weight", POINTER), ("bias", POINTER), ("width", COUNT), ("eps", NUMBER)]


class Branch(ctypes.Structure):
    """The norms before and after a branch, and of the sum with the residual stream."""

    _fields_ = [(name, Norm) for name in ("before", "after", "sum")]


class ExpertsOfLayer(ctypes.Structure):
    """The weights and sizes of a mixture of experts; ``experts.h`` describes the fields."""

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


class Stored(ctypes.Structure):
    """The keys or values of a layer in the cache."""

    _fields_ = [("numbers", POINTER), ("scales", POINTER)]


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


class TokensOfKind:
    """The tokens of a pass as native code sees them in the layers of a kind, with their own copy of the angles."""

    def __init__(self, metadata: AttentionMetadata, rotary: Angles | None, block_size: int, count: int) -> None:
        assert metadata.tiles is not None
        self.metadata, self.rotary = metadata, rotary
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


class TokensOfPass:
    """Describes the tokens of a pass, once for all layers of a kind."""

    def __init__(self) -> None:
        self._newest = deque[TokensOfKind](maxlen=_KINDS)

    def of(
        self, metadata: AttentionMetadata, rotary: Angles | None, block_size: int, count: int, key_width: int
    ) -> TokensOfKind:
        """Describes the `count` tokens; raises `ValueError` if a tensor is not as the native code assumes."""
        for newest in self._newest:
            if newest.metadata is metadata and newest.rotary is rotary:
                return newest
        made = TokensOfKind(metadata, rotary, block_size, count)
        if 2 * made.width > key_width:
            raise ValueError(f"{made.width} angles rotate more than the {key_width} numbers of a head")
        self._newest.append(made)
        return made
