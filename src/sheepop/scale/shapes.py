"""Shapes of networks by their number of weights, and the learning rate of each."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from sheepop.core.errors import UsageError

# Blocks of 128 wide networks are two, of 256 wide ones six, of 512 wide ones ten: about one for each 48 of width.
_WIDTH_OF_A_BLOCK, _FEWEST_BLOCKS, _MOST_BLOCKS = 48, 2, 48
_WIDTHS = (*range(32, 256, 32), *range(256, 1024, 64), *range(1024, 16385, 128))
_HEAD, _WIDE_HEAD, _WIDE = 32, 64, 256
# Through the rates that were measured with Muon (bench/results/minutes.md): 2 layers of width 128, 4 of 192.
_RATE, _RATE_WEIGHTS, _RATE_EXPONENT = 1.6e-2, 12 * 2 * 128**2, 0.19
# No larger one was measured; the estimates of the recipe fall faster from there on.
_MEASURED_WEIGHTS, _BEYOND_EXPONENT = 12 * 4 * 192**2, 0.38


@dataclass(frozen=True)
class Shape:
    """The width, blocks and heads of a decoder."""

    d_model: int
    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.d_model}x{self.num_layers}"

    @classmethod
    def of_width(cls, d_model: int, num_layers: int | None = None) -> Self:
        """The shape of a width, with about one block for each 48 of it and heads of 32, from width 256 on of 64."""
        blocks = 2 * round(d_model / _WIDTH_OF_A_BLOCK / 2)
        blocks = min(max(blocks, _FEWEST_BLOCKS), _MOST_BLOCKS) if num_layers is None else num_layers
        head = _WIDE_HEAD if d_model >= _WIDE and d_model % _WIDE_HEAD == 0 else _HEAD
        return cls(d_model, blocks, d_model // head)

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads ``WIDTHxLAYERS`` or ``WIDTH``; raises `UsageError` for anything else."""
        width, separator, layers = text.strip().partition("x")
        numbers = [width, *([layers] if separator else [])]
        if not all(number.isdecimal() and 0 < int(number) <= 65_536 for number in numbers) or int(width) % _HEAD:
            raise UsageError(f"--sizes {text}: write WIDTHxLAYERS, such as 64x2; the width is a multiple of {_HEAD}.")
        return cls.of_width(int(width), int(layers) if separator else None)

    @property
    def blocks(self) -> int:
        """The approximate number of weights in the blocks."""
        return 12 * self.num_layers * self.d_model**2

    def parameters(self, vocab_size: int) -> int:
        """The approximate number of weights that multiply a token, the output matrix included."""
        return self.blocks + self.d_model * vocab_size

    @property
    def learning_rate(self) -> float:
        """The recipe's rule for Muon: a power of the weights through its measured rates, a steeper one beyond them."""
        within = min(self.blocks, _MEASURED_WEIGHTS) / _RATE_WEIGHTS
        beyond = max(self.blocks, _MEASURED_WEIGHTS) / _MEASURED_WEIGHTS
        return float(f"{_RATE * within**-_RATE_EXPONENT * beyond**-_BEYOND_EXPONENT:.2g}")


def shape_for(parameters: float, vocab_size: int, without: Collection[Shape] = ()) -> Shape:
    """The shape whose weights, with an output matrix for this vocabulary, are nearest to `parameters` in logarithm.

    The shapes in `without` are left out.
    """
    shapes = (shape for width in _WIDTHS if (shape := Shape.of_width(width)) not in without)
    return min(shapes, key=lambda shape: abs(math.log(shape.parameters(vocab_size) / parameters)))
