"""Which tensors a file has for a configuration, and how ours stand in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.gguf.architectures import DIVISORS, Architecture, Role, Row
from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig
from sheepop.model.rotary_scaling import rotary_frequencies

_BALANCE = "feed_forward.router.balance"


@dataclass(frozen=True)
class Place:
    """One tensor of a file, its shape, and the tensors of ours that stand in it with theirs.

    Without ours it holds a `constant`: zeros for a bias that the model lacks, or a function of the configuration.
    `copied` says that ours stands in another place as well, which is the one to read.
    """

    theirs: str
    shape: Shape
    ours: tuple[tuple[str, Shape], ...]
    role: Role
    heads: int | None = None
    centered: bool = False
    copied: bool = False
    constant: Tensor | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Theirs from ours, in the dtype of ours; a norm's scale 1 + weight is computed in single precision."""
        if self.constant is not None:
            return self.constant
        pieces = [self._interleaved(tensor) for tensor in tensors]
        if self.centered:
            pieces = [1 + piece.float() for piece in pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def inverse(self, tensor: Tensor, name: str) -> Tensor:
        """Ours of that `name` from theirs."""
        start = 0
        for own, shape in self.ours:
            if own == name:
                piece = tensor if len(self.ours) == 1 else tensor[start : start + shape[0]]
                return self._halved(piece - 1 if self.centered else piece)
            start += shape[0]
        raise KeyError(name)

    def _interleaved(self, tensor: Tensor) -> Tensor:
        """Rows (i, i + C/2) of each head made neighbours: llama.cpp turns pairs of neighbours."""
        if self.heads is None:
            return tensor
        return tensor.reshape(self.heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)

    def _halved(self, tensor: Tensor) -> Tensor:
        """Neighbouring rows of each head moved apart by half the head."""
        if self.heads is None:
            return tensor
        return tensor.reshape(self.heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)


def places(architecture: Architecture, config: ModelConfig) -> list[Place]:
    """Every tensor of a file for `config`, which `architecture` expresses; the order is that of the network."""
    expected = expected_tensors(config)
    found = list(_places(architecture, config, expected))
    homeless = expected.keys() - {name for place in found for name, _ in place.ours} - balances(config)
    if homeless:
        raise CheckpointError(
            f"llama.cpp's architecture {architecture.name} has no place for {', '.join(sorted(homeless))}."
        )
    return found


def balances(config: ModelConfig) -> set[str]:
    """The tensors that have no place in a file and are zero in every model that can be written."""
    return {f"blocks.{layer}.{_BALANCE}" for layer in range(config.num_layers) if config.has_experts(layer)}


def divisors(config: ModelConfig) -> Tensor | None:
    """What Llama 3's scaling divides the angle of each pair by, as llama.cpp wants it; None for other scalings."""
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    plain, _ = rotary_frequencies(config.rotary_dim, config.position_base)
    scaled, _ = rotary_frequencies(config.rotary_dim, config.position_base, scaling)
    return (plain / scaled).float()


def _places(architecture: Architecture, config: ModelConfig, expected: Mapping[str, Shape]) -> Iterator[Place]:
    constant = divisors(config)
    if constant is not None:
        yield Place(DIVISORS, tuple(constant.shape), (), Role.PRECISE, constant=constant)
    for layer in (None, *range(config.num_layers)):
        for row in architecture.rows:
            place = _place(row, layer, config, expected) if ("{}" in row.theirs) == (layer is not None) else None
            if place is not None:
                yield place


def _place(row: Row, layer: int | None, config: ModelConfig, expected: Mapping[str, Shape]) -> Place | None:
    theirs, *ours = (name if layer is None else name.format(layer) for name in (row.theirs, *row.ours))
    copied = row.instead is not None and ours[0] not in expected
    if copied:
        assert row.instead is not None
        ours = [row.instead]
    shapes = [expected.get(name) for name in ours]
    if any(shape is None for shape in shapes):
        weights = [expected.get(f"{name.rpartition('.')[0]}.weight") for name in ours]
        if not row.zeros or any(shape is None for shape in weights):
            return None
        length = sum(shape[0] for shape in weights if shape is not None)
        return Place(theirs, (length,), (), row.role, constant=torch.zeros(length))
    known = [shape for shape in shapes if shape is not None]
    shape = known[0] if len(known) == 1 else (sum(each[0] for each in known), *known[0][1:])
    heads = None
    if row.interleaved:
        heads = config.num_heads if ".q_proj." in ours[0] else config.kv_heads
    centered = row.role is Role.SCALE and config.norm == "rmsnorm_zero_centered"
    return Place(theirs, shape, tuple(zip(ours, known, strict=True)), row.role, heads, centered, copied)
