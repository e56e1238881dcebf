"""The residual stream of a text, to which every block of a stack adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from sheepop.model.attention.layer import Attention
from sheepop.model.block import Block


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream of one text before each block and after the last: `residuals` (L + 1, T, D).

    `path` is the name of the stack: ``blocks``, or ``encoder_blocks`` for an encoder, in which every token attends to
    all others because it is not `causal`. `embedded` (T, D) are the vectors of the tokens without positions.
    `run_block` runs a block, given its number, on a stream (B, T, D).
    """

    path: str
    blocks: tuple[Block, ...]
    token_ids: list[int]
    embedded: Tensor
    residuals: Tensor
    run_block: Callable[[int, Tensor], Tensor]
    causal: bool

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.token_ids)

    def paths(self) -> Iterator[tuple[str, Block]]:
        """The blocks in order, with their names in the network, such as ``blocks.0``."""
        return ((f"{self.path}.{layer}", block) for layer, block in enumerate(self.blocks))


def attentions_of(block: Block) -> list[tuple[str, Attention]]:
    """The attention layers of a block with their names, in the order in which they run."""
    layers = [("attention", block.attention), ("cross_attention", block.cross_attention)]
    return [(name, layer) for name, layer in layers if layer is not None]
