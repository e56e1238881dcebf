"""The tensors of a file for a configuration, and how our tensors are stored in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sheepop.checkpoint.exchange.tensor_rules import JOINED_EXPERTS, Stacked, regrouped
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.gguf.architectures import Architecture
from sheepop.checkpoint.gguf.rotary import DIVISORS, STANDING
from sheepop.checkpoint.gguf.rows import OUTPUT_NAME, POSITIONS_NAME, Conversion, Role, Row
from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig
from sheepop.model.positions import sinusoidal_table
from sheepop.model.rotary_frequencies import rotary_frequencies

_BALANCE = "feed_forward.router.balance"


@dataclass(frozen=True)
class Place:
    """One tensor of a file, its shape, and the names and shapes of our tensors in it.

    Without any of ours it has the result of `constant`: zeros for a bias that the model lacks, or a function of the
    configuration. `pairs`: the widths of a head and of its rotated part, whose rows are reordered. `copied`: our tensor
    is also stored in another place, from which it is read. `layout`, with `config`, is another relation to our tensors.
    `optional`: a file may lack it, and ours is zero then.
    """

    theirs: str
    shape: Shape
    ours: tuple[tuple[str, Shape], ...]
    role: Role
    pairs: tuple[int, int] | None = None
    centered: bool = False
    scale: float = 1.0
    copied: bool = False
    constant: Callable[[], Tensor] | None = None
    layout: Conversion | None = None
    config: ModelConfig | None = field(default=None, compare=False)
    optional: bool = False

    @property
    def keeps_numbers(self) -> bool:
        """Whether this is a matrix with the numbers of ours, in another order of rows at most."""
        by_rows = self.layout in (None, JOINED_EXPERTS) or isinstance(self.layout, Stacked)
        return self.role is Role.MATRIX and self.scale == 1.0 and len(self.shape) > 1 and by_rows

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Converts our tensors to theirs; arithmetic is in float32."""
        if self.constant is not None:
            return self.constant()
        if self.layout is not None and self.config is not None:
            return self.layout.to_theirs(tensors, self.config)[0]
        pieces = [self._regrouped(self.stored(tensor), interleaved=True) for tensor in tensors]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows(self, name: str) -> slice | None:
        """The rows of their tensor that `inverse` needs for ours called `name`; None for all."""
        if self.layout is not None or len(self.ours) == 1:
            return None
        names = [own for own, _ in self.ours]
        start = sum(shape[0] for _, shape in self.ours[: names.index(name)])
        return slice(start, start + dict(self.ours)[name][0])

    def inverse(self, rows: Tensor, name: str) -> Tensor:
        """Converts the `rows` of their tensor to ours called `name`."""
        if self.layout is not None and self.config is not None:
            names, shapes = zip(*self.ours, strict=True)
            return self.layout.to_ours([rows], shapes, self.config)[names.index(name)]
        return self.restored(self._regrouped(rows, interleaved=False))

    def stored(self, tensor: Tensor) -> Tensor:
        """Returns the stored numbers of one of our tensors, in our order of rows."""
        if self.centered:
            return 1 + tensor.float()
        return tensor if self.scale == 1.0 else tensor.float() * self.scale

    def restored(self, tensor: Tensor) -> Tensor:
        """Returns the numbers of one of our tensors from the stored ones."""
        if self.centered:
            return tensor - 1
        return tensor if self.scale == 1.0 else tensor / self.scale

    def _regrouped(self, tensor: Tensor, *, interleaved: bool) -> Tensor:
        """Makes rows (i, i + R/2) of each head neighbours, as llama.cpp rotates neighbouring pairs, or reverses it."""
        if self.pairs is None:
            return tensor
        half = self.pairs[1] // 2
        return regrouped(tensor, *self.pairs, *((2, half) if interleaved else (half, 2)))


def places(architecture: Architecture, config: ModelConfig) -> list[Place]:
    """Returns all tensors of a file for `config`, which `architecture` can express, in network order."""
    expected = expected_tensors(config)
    found = [*_computed(config), *_of_rows(architecture, config, expected)]
    unmapped = expected.keys() - {name for place in found for name, _ in place.ours} - balances(config)
    if unmapped:
        raise CheckpointError(
            f"llama.cpp's architecture {architecture.name} has no tensors for {', '.join(sorted(unmapped))}."
        )
    return found


def balances(config: ModelConfig) -> set[str]:
    """Returns the tensors that files do not store, and that must be zero in an exported model."""
    return {f"blocks.{layer}.{_BALANCE}" for layer in range(config.num_layers) if config.has_experts(layer)}


def _computed(config: ModelConfig) -> Iterator[Place]:
    """Yields the tensors that are computed from the configuration: divisors of angles, and sinusoids."""
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind in ("llama3", "proportional"):
        yield Place(DIVISORS, (config.rotary_dim // 2,), (), Role.PRECISE, constant=partial(_divisors, config))
    if config.position_encoding == "sinusoidal":
        shape = (config.max_seq_len, config.d_model)
        table = partial(sinusoidal_table, *shape, config.position_base)
        yield Place(POSITIONS_NAME, shape, (), Role.PRECISE, constant=table)


def _divisors(config: ModelConfig) -> Tensor:
    """Returns the divisor of each pair's angle in the scaling of Llama 3, or of Gemma 4."""
    plain, _ = rotary_frequencies(config.rotary_dim, config.position_base)
    scaled, _ = rotary_frequencies(config.rotary_dim, config.position_base, config.rotary_scaling)
    return (plain / scaled).clamp(max=STANDING).float()


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
    beside, unless = (name if layer is None else name.format(layer) for name in (row.beside, row.unless))
    if (beside and beside not in expected) or unless in expected:
        return
    if all(name in expected for name in ours):
        shapes = [expected[name] for name in ours]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        place = Place(theirs, shape, tuple(zip(ours, shapes, strict=True)), row.role, optional=row.optional)
        if row.layout is not None:
            found = row.layout.to_theirs([torch.empty(each, device="meta") for each in shapes], config)[0]
            place = replace(place, shape=tuple(found.shape), layout=row.layout, config=config)
        yield _as_it_is_stored(place, row, config, scale)
    elif row.zeros and all(_weight(name) in expected for name in ours):
        length = sum(expected[_weight(name)][0] for name in ours)
        yield Place(theirs, (length,), (), row.role, constant=partial(torch.zeros, length))
    elif theirs == OUTPUT_NAME and (row.always or scale != 1.0):
        # A tied embedding is stored here without its scale, so if it is scaled, it is read from here.
        own = "embedding.weight"
        yield Place(theirs, expected[own], ((own, expected[own]),), row.role, copied=scale == 1.0)


def _as_it_is_stored(place: Place, row: Row, config: ModelConfig, scale: float) -> Place:
    """Adds the conversion of the numbers to a place."""
    if row.interleaved:
        return replace(place, pairs=(config.head_size, config.rotary_dim))
    if row.scaled and scale != 1.0:
        return replace(place, scale=scale, copied=config.tie_weights)
    return replace(place, centered=row.role is Role.SCALE and config.norm == "rmsnorm_zero_centered")


def _weight(bias: str) -> str:
    return f"{bias.rpartition('.')[0]}.weight"
