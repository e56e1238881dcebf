"""The sizes among which the recipe chooses: measured ones up to 1e14 operations, and by a scaling law above."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sheepop.scale.law import recipe_law
from sheepop.scale.shapes import shape_for

# Beyond what was measured: a size for each factor of operations, up to the last one.
_FACTOR, _LAST = 2.0, 1e18
# Estimates by operations, from the largest: tokens of a row, vocabulary, rows of a step.
_ROWS = ((1e16, 512, 8192, 64), (1e15, 512, 8192, 32), (0.0, 256, 4096, 16))


@dataclass(frozen=True)
class Size:
    """A model size that is worth training with a budget of at least `flops` operations."""

    flops: float
    d_model: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    vocab_size: int
    learning_rate: float
    batch_size: int

    @property
    def weights(self) -> int:
        """The approximate number of weights in the blocks."""
        return 12 * self.num_layers * self.d_model**2

    def cost(self, tokens: float) -> float:
        """Approximate operations of training on this many tokens (Kaplan et al. 2020, section 2.1)."""
        return 6 * (self.weights + self.d_model * self.vocab_size) * tokens


# Larger models, longer rows and larger vocabularies win only once they see enough text: bench/results/minutes.md.
MEASURED = (
    Size(0.0, 64, 2, 2, 128, 1024, 2.0e-2, 16),
    Size(1.0e12, 96, 2, 3, 128, 2048, 1.6e-2, 16),
    Size(3.0e12, 128, 2, 4, 128, 2048, 1.6e-2, 16),
    Size(3.0e13, 128, 4, 4, 128, 2048, 1.4e-2, 16),
    Size(1.0e14, 192, 4, 6, 128, 2048, 1.2e-2, 16),
)


def _by_law() -> Iterator[Size]:
    """Larger sizes: from the largest measured one on, the best N grows with the operations as the law says.

    A law that was fitted to other text and networks knows how N grows, but not its level, which depends on the text,
    the vocabulary and the number of passes. So its exponent is used, and the level of the measured size.
    """
    last, share = MEASURED[-1], recipe_law().law.share
    of_last = last.weights + last.d_model * last.vocab_size
    flops = _FACTOR * last.flops
    while flops <= _LAST:
        length, vocab_size, rows = next(rest for least, *rest in _ROWS if flops >= least)
        shape = shape_for(of_last * (flops / last.flops) ** share, vocab_size)
        yield Size(
            flops,
            shape.d_model,
            shape.num_layers,
            shape.num_heads,
            length,
            vocab_size,
            shape.learning_rate,
            rows,
        )
        flops *= _FACTOR


SIZES = (*MEASURED, *_by_law())
