"""The most that a rank holds at a time in a step: weights and gradients as they come and go, and activations.

When whole weights, gradients and the memory of their exchange are there follows from how FSDP2 handles a group of
weights: it gathers into one piece of memory and copies into another, gathers one block ahead on the way back, and keeps
what it has handed over until the next group comes (Zhao et al. 2023, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sheepop.parallel.stage_memory import FLOAT, StageMemory


def peak_in_turn(network: StageMemory, zero: int, micro_batches: int) -> float:
    """The most at a time, where a rank computes one micro-batch after the other; what it always holds not included."""
    return max(_moments_in_turn(network, zero, micro_batches))


def _moments_in_turn(network: StageMemory, zero: int, micro_batches: int) -> Iterator[float]:
    blocks, outside, frees = network.blocks, network.outside, zero == 3
    weights = [block.weights for block in blocks]
    pieces = sum(group.piece for group in network.groups)
    # Gradients of the micro-batches before the last: whole, or in pieces that stay beside the new ones.
    adds_up_whole = micro_batches > 1 and zero < 2
    stays = pieces if micro_batches > 1 and zero >= 2 else 0.0
    before = sum(group.added for group in network.groups) if adds_up_whole else stays
    kept, all_whole = sum(block.kept for block in blocks), sum(group.whole for group in weights)
    if outside.is_cut:  # what a block was gathered into stays beside the copies until those of the next are made
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


def peak_through_stages(
    stages: Sequence[StageMemory], in_flight: Sequence[int], micro_batches: int, waiting: int | None = None
) -> float:
    """The same where micro-batches come and go, at most `in_flight` at a time in each stage.

    Whole weights and gradients are there all the time, and memory for what each micro-batch brings along. Where
    gradients of weights are put off, so many micro-batches of each stage are `waiting` for them at the end.
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
    # Where all are in flight, none has been gone back through yet.
    all_in_flight = max(in_flight) == micro_batches
    moments = [always + kept + more + (sum(stage.head for stage in stages) if all_in_flight else added)]
    moments += [always + kept - stage.kept + more + added for stage in stages]
    moments += [always + added + back + (waiting or 0) * sum(stage.kept + stage.apart for stage in stages)]
    moments += [always + added - group.whole - group.added + group.handing_over(group.added) for group in groups]
    return max(moments)
