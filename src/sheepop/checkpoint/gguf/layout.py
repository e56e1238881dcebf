"""Which tensors a file has for a configuration, and how ours stand in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.gguf.architectures import Architecture
from sheepop.checkpoint.gguf.rotary import DIVISORS
from sheepop.checkpoint.gguf.rows import OUTPUT_NAME, POSITIONS_NAME, Role, Row
from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig
from sheepop.model.positions import sinusoidal_table
from sheepop.model.rotary_frequencies import rotary_frequencies

_BALANCE = "feed_forward.router.balance"


@dataclass(frozen=True)
class Place:
    """One tensor of a file, its shape, and the tensors of ours that stand in it with theirs.

    Without ours it holds what `constant` computes: zeros for a bias that the model lacks, or a function of the
    configuration. `copied` says that ours stands in another place as well, which is the one to read.
    """

    theirs: str
    shape: Shape
    ours: tuple[tuple[str, Shape], ...]
    role: Role
    heads: int | None = None
    centered: bool = False
    scale: float = 1.0
    copied: bool = False
    constant: Callable[[], Tensor] | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Theirs from ours; what is computed is computed in single precision."""
        if self.constant is not None:
            return self.constant()
        pieces = [self._interleaved(self.stored(tensor)) for tensor in tensors]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def inverse(self, tensor: Tensor, name: str) -> Tensor:
        """Ours of that `name` from theirs."""
        start = 0
        for own, shape in self.ours:
            if own == name:
                piece = tensor if len(self.ours) == 1 else tensor[start : start + shape[0]]
                return self.restored(self._halved(piece))
            start += shape[0]
        raise KeyError(name)

    def stored(self, tensor: Tensor) -> Tensor:
        """The numbers of one of ours as they are stored, in our order."""
        if self.centered:
            return 1 + tensor.float()
        return tensor if self.scale == 1.0 else tensor.float() * self.scale

    def restored(self, tensor: Tensor) -> Tensor:
        """The numbers of one of ours from those that were stored."""
        if self.centered:
            return tensor - 1
        return tensor if self.scale == 1.0 else tensor / self.scale

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
    found = [*_computed(config), *_of_rows(architecture, config, expected)]
    homeless = expected.keys() - {name for place in found for name, _ in place.ours} - balances(config)
    if homeless:
        raise CheckpointError(
            f"llama.cpp's architecture {architecture.name} has no place for {', '.join(sorted(homeless))}."
        )
    return found


def balances(config: ModelConfig) -> set[str]:
    """The tensors that have no place in a file and are zero in every model that can be written."""
    return {f"blocks.{layer}.{_BALANCE}" for layer in range(config.num_layers) if config.has_experts(layer)}


def _computed(config: ModelConfig) -> Iterator[Place]:
    """Tensors that follow from the configuration: divisors of angles, and sinusoids."""
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        yield Place(DIVISORS, (config.rotary_dim // 2,), (), Role.PRECISE, constant=partial(_divisors, config))
    if config.position_encoding == "sinusoidal":
        shape = (config.max_seq_len, config.d_model)
        table = partial(sinusoidal_table, *shape, config.position_base)
        yield Place(POSITIONS_NAME, shape, (), Role.PRECISE, constant=table)


def _divisors(config: ModelConfig) -> Tensor:
    """What Llama 3's scaling divides the angle of each pair by."""
    plain, _ = rotary_frequencies(config.rotary_dim, config.position_base)
    scaled, _ = rotary_frequencies(config.rotary_dim, config.position_base, config.rotary_scaling)
    return (plain / scaled).float()


def _of_rows(architecture: Architecture, config: ModelConfig, expected: Mapping[str, Shape]) -> Iterator[Place]:
    scale = float(config.embedding_scale or 1.0) if any(row.scaled for row in architecture.rows) else 1.0
    for layer in (None, *range(config.num_layers)):
        for row in architecture.rows:
            if ("{}" in row.theirs) == (layer is not None):
                yield from _of_row(row, layer, config, expected, scale)


def _of_row(
    row: Row, layer: int | None, config: ModelConfig, expected: Mapping[str, Shape], scale: float
) -> Iterator[Place]:
    theirs, *ours = (name if layer is None else name.format(layer) for name in (row.theirs, *row.ours))
    if all(name in expected for name in ours):
        shapes = [expected[name] for name in ours]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        place = Place(theirs, shape, tuple(zip(ours, shapes, strict=True)), row.role)
        yield _as_it_is_stored(place, row, config, scale)
    elif row.zeros and all(_weight(name) in expected for name in ours):
        length = sum(expected[_weight(name)][0] for name in ours)
        yield Place(theirs, (length,), (), row.role, constant=partial(torch.zeros, length))
    elif theirs == OUTPUT_NAME and (row.always or scale != 1.0):
        # A tied embedding that is scaled stands here as it is, which makes this its place; otherwise it is a copy.
        own = "embedding.weight"
        yield Place(theirs, expected[own], ((own, expected[own]),), row.role, copied=scale == 1.0)


def _as_it_is_stored(place: Place, row: Row, config: ModelConfig, scale: float) -> Place:
    """The place with what is done to the numbers on their way."""
    if row.interleaved:
        queries = ".q_proj." in place.ours[0][0]
        return replace(place, heads=config.num_heads if queries else config.kv_heads)
    if row.scaled and scale != 1.0:
        return replace(place, scale=scale, copied=config.tie_weights)
    return replace(place, centered=row.role is Role.SCALE and config.norm == "rmsnorm_zero_centered")


def _weight(bias: str) -> str:
    return f"{bias.rpartition('.')[0]}.weight"
