"""What a layout costs, computed from shapes: bytes of memory of a rank, and bytes that it sends in a step.

When whole weights, gradients and communication buffers exist follows from how FSDP2 handles a group of parameters: it
gathers into one buffer and copies into another, prefetches one block in the backward pass, and keeps what it has
reduced until the next group comes (Zhao et al. 2023, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sheepop.core.facts import counted
from sheepop.model import ModelConfig, Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.pipeline import in_flight
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.stage_memory import FLOAT, StageMemory, StepShape, share_of_others, stages_of

_OF_LOSS = 4  # the greatest logit, the label's, their sum and that of their exponentials
_CUT = {
    0: "every copy whole",
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


@dataclass(frozen=True)
class Plan:
    """The bytes of one rank: `held` between steps, by kind, `peak` in a step, and `sent` in a step, by purpose.

    `held` are weights, all gradients and the state of optimizers. `peak` is the most that tensors take at a time, with
    activations and communication buffers; an allocator and a communication library hold more.

    `sent` is the least that the strategy needs: of n ranks each sends (n - 1) / n of what is gathered, scattered or
    exchanged, and twice that of an all-reduce (Patarasuk and Yuan 2009).
    """

    layout: Layout
    held: Mapping[str, float]
    sent: Mapping[str, float]
    peak: float

    @classmethod
    def largest(cls, model: Transformer, layout: Layout, step: StepShape, state: float = 2.0) -> Plan:
        """Returns the plan of the rank that needs the most memory; ranks of a pipeline have different layers.

        `model` may be on the meta device. The optimizer keeps `state` numbers for each weight, in float32 like weights
        and gradients.
        """
        stages = stages_of(model, layout, step)
        ranks = (Ranks(number * layout.stage_size, layout.ranks.size) for number in range(layout.config.pipeline))
        plans = (cls.of(model.config, Layout(rank, layout.config), step, stages, state) for rank in ranks)
        return max(plans, key=lambda plan: plan.peak)

    @classmethod
    def of(
        cls, model: ModelConfig, layout: Layout, step: StepShape, stages: Sequence[StageMemory], state: float = 2.0
    ) -> Plan:
        """Returns the plan of this rank of `layout`, with all `stages` of the network."""
        config, rank = layout.config, layout.pipeline_rank
        here = [stages[number] for number in config.stages_of(rank)]
        pieces = sum(group.piece for stage in here for group in stage.groups)
        added = sum(group.added for stage in here for group in stage.groups)
        twice = _tied(model, layout) if _ends(layout) == 2 else 0.0
        held = {
            "weights": pieces,
            "gradients": pieces if config.zero >= 2 else added,
            "optimizer": state * (pieces - twice),
        }
        if config.pipeline == 1:
            most = max(_moments_in_turn(here[0], config.zero, step.micro_batches))
        else:
            kept = in_flight(config, rank, step.micro_batches)
            most = _peak_through_stages(here, kept, step.micro_batches, rank if config.puts_off_weights else None)
        always = held["weights"] + held["optimizer"] + sum(stage.lasting for stage in here)
        return cls(layout, held, _sent(model, layout, step, here), always + most)

    def __str__(self) -> str:
        config = self.layout.config
        over = f" in {counted(self.layout.num_pieces, 'piece')}" if config.zero else ""
        most = ", ".join(f"{name} {_megabytes(value)}" for name, value in self.sent.items() if value)
        who = "Each" if config.pipeline == 1 else f"Rank {self.layout.ranks.rank}, which needs most memory,"
        return (
            f"{self.layout.words}; {_CUT[config.zero]}{over}. {who} holds "
            f"{_megabytes(sum(self.held.values()))} of weights, gradients and optimizer state, and at its peak about "
            f"{_megabytes(self.peak)} with activations. It sends at least {_megabytes(sum(self.sent.values()))} a step "
            f"({most})."
        )


def _moments_in_turn(network: StageMemory, zero: int, micro_batches: int) -> Iterator[float]:
    """Yields the bytes at each moment that may be the peak, for a rank without a pipeline, without those that last."""
    blocks, outside, frees = network.blocks, network.outside, zero == 3
    weights = [block.weights for block in blocks]
    pieces = sum(group.piece for group in network.groups)
    # Gradients of the earlier micro-batches: whole, or in pieces that exist beside the new ones.
    adds_up_whole = micro_batches > 1 and zero < 2
    stays = pieces if micro_batches > 1 and zero >= 2 else 0.0
    before = sum(group.added for group in network.groups) if adds_up_whole else stays
    kept, all_whole = sum(block.kept for block in blocks), sum(group.whole for group in weights)
    if outside.is_cut:  # the buffer a block was gathered into lives until the copies of the next block are made
        last, others = weights[-1], 0.0 if frees else all_whole - weights[-1].whole
        into = last.gathering
        before_it = last.whole - into or into  # of a block's two groups the other one, else the block before
        gathered = outside.whole + others + last.whole + into + (stays if frees else 0.0)
        yield gathered + max(kept, kept - blocks[-1].kept + before_it)
    yield outside.whole + (0.0 if frees else all_whole) + kept + network.rest + network.loss + before
    for place in reversed(range(len(blocks))):
        block, group = blocks[place], weights[place]
        kept -= block.kept
        ahead = weights[place - 1].whole if place else 0.0
        others = ahead if frees else sum(each.whole for each in weights[:place])
        handed_over = FLOAT * weights[place + 1].padded if place + 1 < len(blocks) else 0.0
        gradients = stays + sum(each.piece for each in weights[place + 1 :])
        gradients += outside.added + sum(each.added for each in weights[:place]) if adds_up_whole else network.head
        own = group.added if adds_up_whole else 0.0
        here = outside.whole + others + kept + gradients
        rest = network.rest if place + 1 == len(blocks) else 0.0
        yield here + handed_over + group.whole + own + block.kept + block.again + block.back + rest
        yield here + handed_over + group.whole + (own or group.fresh) + 2 * network.stream
        yield here + group.handing_over(own or group.fresh) + 2 * network.stream
    yield stays + pieces - outside.piece + outside.handing_over(outside.added)


def _peak_through_stages(
    stages: Sequence[StageMemory], in_flight: Sequence[int], micro_batches: int, waiting: int | None
) -> float:
    """Returns the peak of a rank of a pipeline, each of whose stages has at most `in_flight` micro-batches at a time.

    Whole weights and gradients always exist, and so do receive buffers for all micro-batches. With `zero_bubble`,
    `waiting` micro-batches of each stage still wait for their gradients of weights at the end.
    """
    groups = [group for stage in stages for group in stage.groups]
    added = sum(group.added for group in groups)
    arriving = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    always = sum(group.whole for group in groups) + micro_batches * arriving * stages[0].stream
    kept = sum(stage.kept * count for stage, count in zip(stages, in_flight, strict=True))
    back = max(block.again + block.back for stage in stages for block in stage.blocks)
    if waiting is not None:
        back += max(stage.apart for stage in stages)
    more = max(back, *(stage.loss for stage in stages))
    # If all are in flight, no backward pass has run yet.
    all_in_flight = max(in_flight) == micro_batches
    moments = [always + kept + more + (sum(stage.head for stage in stages) if all_in_flight else added)]
    moments += [always + kept - stage.kept + more + added for stage in stages]
    moments += [always + added + back + (waiting or 0) * sum(stage.kept + stage.apart for stage in stages)]
    moments += [always + added - group.whole - group.added + group.handing_over(group.added) for group in groups]
    return max(moments)


def _sent(model: ModelConfig, layout: Layout, step: StepShape, stages: Sequence[StageMemory]) -> dict[str, float]:
    config, zero, micro_batches = layout.config, layout.config.zero, step.micro_batches
    blocks = [block for stage in stages for block in stage.blocks]
    again = sum(block.again > 0 for block in blocks)
    inside = sum(block.weights.to_gather * block.weights.itemsize for block in blocks)
    outside = sum(stage.outside.to_gather * stage.outside.itemsize for stage in stages)
    added_up = FLOAT * sum(group.to_add for stage in stages for group in stage.groups)
    tokens = step.rows * step.num_tokens / config.context * micro_batches
    stream, own_tokens = tokens * model.d_model * step.itemsize, tokens / config.tensor
    # Each sublayer gathers and scatters tokens, in both directions, but experts read those that are here. A recomputed
    # block does it again, except for the last scattering, whose result only a following norm would keep.
    exchanges = 0
    for block in blocks:
        sublayers = 1 if block.is_mixture and model.experts is not None and not model.experts.shared else 2
        exchanges += 4 * sublayers
        if block.again:
            exchanges += 2 * sublayers - (sublayers == 2 and model.norm_position == "pre")
    # Before and after all layers: the residual stream, and the sums of the loss over parts of the vocabulary.
    ends = sum(stage.is_first + stage.is_last for stage in stages)
    around = ends * stream
    if config.tensor > 1:
        around = 2 * around + 2 * FLOAT * _OF_LOSS * tokens * sum(stage.is_last for stage in stages)
    of_experts = 0.0
    if model.experts is not None:  # loads are taken to be even
        mixtures = [block for block in blocks if block.is_mixture]
        passes = 4 * len(mixtures) + 2 * sum(block.again > 0 for block in mixtures)
        of_experts = passes * own_tokens * model.experts.per_token * model.d_model * step.itemsize
    return {
        "weights": micro_batches * (outside + 2 * inside) if zero == 3 else outside + inside,
        "gradients": added_up * (micro_batches if zero >= 2 else 1),
        "sums of layers": share_of_others(config.tensor) * stream * exchanges,
        "tokens of embedding and head": share_of_others(config.tensor) * around,
        **_of_attention(model, config, step.itemsize, own_tokens, len(blocks), again),
        "tokens for experts": share_of_others(config.expert) * of_experts,
        "hidden states": _links(config, stages) * stream / config.tensor,
        "the tied weight": 2 * share_of_others(2) * (_tied(model, layout) if _ends(layout) == 1 else 0),
    }


def _of_attention(
    model: ModelConfig, parallel: ParallelConfig, itemsize: int, tokens: float, blocks: int, again: int
) -> dict[str, float]:
    """Returns what a context rank sends in the attention of `blocks`, of which `again` are recomputed.

    In a ring of n ranks each sends keys and values n - 1 times forwards and n - 1 times backwards, and their float32
    gradients n times, so that they return to their rank.
    """
    ranks, (kv_heads, key_width, value_width) = parallel.context, model.widest_heads
    kept = kv_heads * (key_width + value_width)
    if parallel.context_method == "ring":
        passes = (ranks - 1) * (2 * blocks + again) * itemsize + ranks * blocks * FLOAT
        return {"keys and values": passes * tokens * kept}
    width = kept + model.num_heads * (key_width + value_width)
    return {"tokens for heads": share_of_others(ranks) * tokens * width * itemsize * (2 * blocks + again)}


def _links(config: ParallelConfig, stages: Sequence[StageMemory]) -> int:
    """Counts the tensors that a rank's `stages` send to those of other ranks: the residual stream, or its gradient."""
    here = {stage.number for stage in stages}
    others = {(number, number + step) for number in here for step in (-1, 1)}
    return sum(0 <= other < config.num_stages and other not in here for _, other in others)


def _ends(layout: Layout) -> int:
    """Returns 2 if this rank has both the first and the last stage, 1 if it has one of them, else 0."""
    return len({0, layout.config.num_stages - 1} & set(layout.config.stages_of(layout.pipeline_rank)))


def _tied(model: ModelConfig, layout: Layout) -> float:
    """Returns the bytes of a rank's piece of a weight that the first and the last stage share, 0 if there is none."""
    if not model.tie_weights or layout.config.pipeline == 1:
        return 0.0
    rows = math.ceil(model.vocabulary / layout.config.tensor)
    return FLOAT * rows * model.d_model / layout.num_pieces


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value < 1e9 else f"{value / 1e9:,.1f} GB"
