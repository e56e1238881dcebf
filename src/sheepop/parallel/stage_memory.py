"""The memory of a pipeline stage on one rank, in bytes: its part of the weights, and what its layers keep in a step.

What a block saves for the backward pass is counted by running the network on fake tensors (`saved_activations`), with
the heads, features and tokens that a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sheepop.model import ModelConfig, Transformer
from sheepop.model.accounting.saved_activations import Activations, Mode, count_activations, count_going_back
from sheepop.model.logits import logits_bytes
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.pipeline import OF_THE_FIRST, OF_THE_LAST, layers_of
from sheepop.parallel.tensor import config_of_part

FLOAT = 4
_EXPERTS = ".experts."


@dataclass(frozen=True)
class StepShape:
    """The steps of a rank: `micro_batches` of `rows` whole rows with `num_tokens` each, and how they are computed.

    The first `recomputed_blocks` (all if None) are recomputed in the backward pass, unless `recomputed` is ``none``.
    """

    rows: int
    num_tokens: int
    micro_batches: int = 1
    precision: str = "fp32"
    device: str = "cpu"
    recomputed: Mode = "none"
    recomputed_blocks: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number between layers, and of a number of the weights that a block computes with."""
        return 2 if self.precision == "bf16" else FLOAT

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of matrix products, including that of the output head."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.precision, torch.bfloat16)

    def recomputes(self, layer: int) -> bool:
        """Whether a layer is recomputed in the backward pass."""
        return self.recomputed != "none" and (self.recomputed_blocks is None or layer < self.recomputed_blocks)


@dataclass(frozen=True)
class Weights:
    """Counts of a group of parameters that is gathered and reduced together.

    A rank computes with `numbers`; `padded` counts those of equal pieces, of which a rank keeps `kept`. It sends
    `to_gather` numbers to gather all of the group, and `to_add` to sum gradients. Experts with another mesh are
    gathered apart from the rest, and `at_once` is the larger of the two. Ranks compute with numbers of `itemsize`
    bytes; all else is float32.
    """

    numbers: float
    padded: float
    kept: float
    to_gather: float
    to_add: float
    at_once: float
    itemsize: int = FLOAT

    def and_more(self, other: Weights) -> Weights:
        """Returns these weights and `other` together: sums of bytes, and the larger of both `at_once`."""
        names = ("numbers", "padded", "kept", "to_gather", "to_add")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **sums, at_once=max(self.at_once, other.at_once))

    @property
    def is_cut(self) -> bool:
        """Whether each rank keeps only a piece of the weights."""
        return self.kept < self.padded

    @property
    def whole(self) -> float:
        """The bytes of the gathered weights."""
        return self.padded * self.itemsize

    @property
    def gathering(self) -> float:
        """Bytes of the largest buffer that weights are gathered into."""
        return self.at_once * self.itemsize

    @property
    def piece(self) -> float:
        """Bytes of one rank's piece of the weights, or of their gradient."""
        return FLOAT * self.kept

    @property
    def fresh(self) -> float:
        """Bytes of the gradient of one pass."""
        return self.numbers * self.itemsize

    @property
    def added(self) -> float:
        """Bytes of the sum of the gradients of several passes."""
        return FLOAT * self.numbers

    def handing_over(self, gradient: float) -> float:
        """Returns the most bytes while ranks sum a gradient: it and its copy, then the copy and a piece.

        If there are no pieces, the copy is divided by 1 into another copy.
        """
        buffer = FLOAT * self.padded
        return max(gradient + buffer, buffer + self.piece + (0.0 if self.is_cut else buffer))


@dataclass(frozen=True)
class BlockMemory:
    """A block: its weights, the bytes `kept` of a micro-batch, and those of its backward pass.

    `again` are the bytes that recomputation brings back, and `back` those that the backward pass adds. `apart` are the
    gradients of the results of products and norms, which wait if gradients of weights are postponed.
    """

    weights: Weights
    kept: float
    again: float
    back: float
    apart: float
    is_mixture: bool = False


@dataclass(frozen=True)
class StageMemory:
    """A stage, or the whole network as one stage: its blocks, the weights outside them, and bytes of a micro-batch.

    `stream` is the residual stream between layers, and `rest` is kept outside blocks. In the last stage `loss` exists
    while a loss is computed, `head` is the gradient of the output head, and `lasting` is memory that the head keeps.
    """

    blocks: Sequence[BlockMemory]
    outside: Weights
    stream: float
    number: int
    is_first: bool
    is_last: bool
    rest: float = 0.0
    loss: float = 0.0
    head: float = 0.0
    lasting: float = 0.0

    @property
    def groups(self) -> list[Weights]:
        """All weights of the stage."""
        return [self.outside, *(block.weights for block in self.blocks)]

    @property
    def kept(self) -> float:
        """Bytes kept of a micro-batch: the stage's output, or the gradient of the loss, but not its input."""
        inside = sum(block.kept for block in self.blocks) + self.rest
        return inside + self.stream - (0.0 if self.is_first else self.stream)

    @property
    def apart(self) -> float:
        """Bytes kept until the postponed gradients of weights are computed; the first stage postpones none."""
        return 0.0 if self.is_first else sum(block.apart for block in self.blocks)


def stages_of(model: Transformer, layout: Layout, step: StepShape) -> list[StageMemory]:
    """Returns the stages of `model`, which may be on the meta device, each with the memory of one of its ranks."""
    activations, back = _activations(model.config, layout.config, step)
    apart = 2 * activations.block_input
    blocks = []
    for layer, (block, each) in enumerate(zip(model.layers, activations.blocks, strict=True)):
        kept = each.everything
        if step.recomputes(layer):
            kept = activations.block_input + (each.selective if step.recomputed == "selective" else each.full)
        weights = _weights(block.named_parameters(), layout, step.itemsize, _split_in_block)
        weights = weights.and_more(_experts(block.named_parameters(), layout, step.itemsize))
        again = max(0, each.everything - kept)
        blocks.append(BlockMemory(weights, kept, again, back[layer], each.selective + apart, layer in model.mixtures))
    count = layout.config.num_stages
    layers = [layers_of(number, count, len(blocks)) for number in range(count)]
    return [
        _stage(model, layout, step, blocks[here.start : here.stop], activations.rest, number)
        for number, here in enumerate(layers)
    ]


def _stage(
    model: Transformer, layout: Layout, step: StepShape, blocks: Sequence[BlockMemory], rest: int, number: int
) -> StageMemory:
    """Returns stage `number` with these blocks; a whole network keeps `rest` bytes outside them."""
    config, parallel = model.config, layout.config
    is_first, is_last = number == 0, number == parallel.num_stages - 1
    gone = {*(() if is_first else OF_THE_FIRST), *(() if is_last else OF_THE_LAST)}
    inner = {id(parameter) for block in model.layers for parameter in block.parameters()}
    outside: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in inner and name.partition(".")[0] not in gone:
            outside.setdefault(id(parameter), (name, parameter))
    weights = _weights(outside.values(), layout, FLOAT, _split_outside)
    tokens = step.rows * step.num_tokens // parallel.context
    hidden = tokens * config.d_model * step.itemsize
    stage = StageMemory(blocks, weights, hidden // parallel.tensor, number, is_first, is_last)
    if not is_last:
        return stage
    size = math.ceil(config.vocabulary / parallel.tensor)
    logits = logits_bytes(tokens, size, step.product_dtype, step.device)
    stays = step.device == "cpu"  # see `OutputHead.keep_memory`
    head = FLOAT * size * config.d_model
    cast = head // 2 if step.precision == "bf16" else 0
    return replace(
        stage, rest=rest, head=head, loss=hidden + head + (0 if stays else logits), lasting=cast + logits * stays
    )


_Split = Callable[[str, Tensor, int], tuple[int, int]]


def _weights(parameters: Iterable[tuple[str, Tensor]], layout: Layout, itemsize: int, split: _Split) -> Weights:
    """Counts the weights of the first tensor rank, in pieces of whole rows, without experts."""
    pieces, numbers, padded = layout.num_pieces, 0.0, 0.0
    for name, parameter in parameters:
        if _EXPERTS in name:
            continue
        over_rows, over_columns = split(name, parameter, layout.config.tensor)
        rows, columns = math.ceil(parameter.shape[0] / over_rows), parameter[0].numel() / over_columns
        numbers += rows * columns
        padded += math.ceil(rows / pieces) * pieces * columns
    return _cut(numbers, padded, pieces, layout.num_copies // pieces, itemsize)


def _experts(parameters: Iterable[tuple[str, Tensor]], layout: Layout, itemsize: int) -> Weights:
    """Counts the weights of a rank's experts; see `Layout.expert_mesh` and `sharding.shard`."""
    pieces, numbers, padded = layout.num_expert_pieces, 0.0, 0.0
    for parameter in (parameter for name, parameter in parameters if _EXPERTS in name):
        count, width = parameter.shape[0] // layout.config.expert, parameter.shape[1]
        here = parameter.numel() / layout.config.expert
        numbers += here
        is_even = count % pieces == 0 or width % pieces == 0
        padded += here if is_even else math.ceil(count / pieces) * pieces * parameter[0].numel()
    return _cut(numbers, padded, pieces, layout.stage_size // (pieces * layout.config.expert), itemsize)


def _cut(numbers: float, padded: float, pieces: int, replicas: int, itemsize: int) -> Weights:
    """Counts weights that exist in `replicas`, each cut into `pieces`."""
    to_gather = share_of_others(pieces) * padded
    to_add = to_gather + 2 * share_of_others(replicas) * padded / pieces
    return Weights(numbers, padded, padded / pieces, to_gather, to_add, padded, itemsize)


def share_of_others(ranks: int) -> float:
    """Returns which share of a tensor a rank sends when `ranks` gather, scatter or exchange it."""
    return (ranks - 1) / ranks


def _split_in_block(name: str, parameter: Tensor, count: int) -> tuple[int, int]:
    """Returns the number of tensor ranks that split a block's parameter, by rows and by columns; see `tensor.split`."""
    if name.endswith(("o_proj.weight", "down_proj.weight", ".taps")):
        return 1, count
    is_whole = name.endswith(("o_proj.bias", "down_proj.bias")) or "_latent_proj" in name
    is_split = parameter.ndim > 1 or name.endswith(("_proj.bias", "sinks"))
    return (count if is_split and not is_whole else 1), 1


def _split_outside(name: str, parameter: Tensor, count: int) -> tuple[int, int]:
    """Does the same as `_split_in_block` for a parameter outside blocks."""
    is_split = name in ("embedding.weight", "lm_head.weight", "lm_head.bias")
    return (count if is_split else 1), 1


def _activations(config: ModelConfig, parallel: ParallelConfig, step: StepShape) -> tuple[Activations, tuple[int, ...]]:
    """Counts what a rank keeps of a micro-batch, and what the backward pass of each block adds.

    A tensor rank has some heads and features, for all tokens. Tensors as wide as the residual stream it has for its own
    tokens only, except the two that sublayers start with. Their size is the part of a block's that does not shrink with
    heads and features: ``(n a(1/n) - a(1)) / (n - 1)`` if a block with a share s of them keeps a(s). After attention a
    context rank keeps both its result and what it received for it.
    """
    rows, tokens, count = step.rows, step.num_tokens // parallel.context, parallel.tensor
    here = config if count == 1 else config_of_part(config, count)
    how: Any = {"precision": step.precision, "device": step.device}
    found, back = count_activations(here, rows, tokens, **how), count_going_back(here, rows, tokens, **how)
    stream = found.block_input
    more = [0.0] * len(found.blocks)
    if parallel.context > 1:
        more = [stream * config.num_heads * config.widest_heads.value_width / config.d_model / count] * len(more)
    if count > 1:
        elsewhere = 1 - 1 / count
        every = count_activations(config, rows, tokens, **how)
        for layer, (some, all_heads) in enumerate(zip(found.blocks, every.blocks, strict=True)):
            wide = (count * some.everything - all_heads.everything) / (count - 1)
            more[layer] += elsewhere * (2 * stream - wide)
        rest = round(found.rest - elsewhere * (found.rest - stream))
        found = replace(found, block_input=stream // count, rest=rest)
    pairs = zip(found.blocks, more, strict=True)
    blocks = (replace(block, everything=round(block.everything + extra)) for block, extra in pairs)
    return replace(found, blocks=tuple(blocks)), back
