"""The order and the times of the passes in a pipeline's step, for its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.pipeline import SCHEDULES

# Kinds of work, by torch's names.
FORWARD, BACKWARD, OF_INPUTS, OF_WEIGHTS = "FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"
# A backward pass takes twice the time of a forward pass: half for gradients of inputs, half for those of weights.
_UNITS = {FORWARD: 1.0, BACKWARD: 2.0, OF_INPUTS: 1.0, OF_WEIGHTS: 1.0}


@dataclass(frozen=True)
class Work:
    """A pass of a micro-batch through a stage; `kind` is forward, backward, or one of the two halves of backward."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Span:
    """The work of a rank from `start` to `end`; the unit is a rank's forward pass of one micro-batch."""

    rank: int
    work: Work
    start: float
    end: float


def timeline(config: ParallelConfig, count: int) -> list[Span]:
    """Returns the spans of a step of `count` micro-batches in the order of `config.schedule`, each as early as it can.

    A forward pass waits for the previous stage, a backward pass for the next stage; communication takes no time.
    """
    orders = {rank: _order(config, count, rank) for rank in range(config.pipeline)}
    unit, last = config.pipeline / config.num_stages, config.num_stages - 1
    free, ends, found = dict.fromkeys(orders, 0.0), dict[Work, float](), list[Span]()
    while any(orders.values()):
        ready = [rank for rank, left in orders.items() if left and ends.keys() >= _before(left[0], last)]
        assert ready, "the order of a pipeline comes to a halt"
        for rank in ready:
            work = orders[rank].pop(0)
            start = max([free[rank], *(ends[before] for before in _before(work, last))])
            free[rank] = ends[_done(work)] = start + unit * _UNITS[work.kind]
            found.append(Span(rank, work, start, free[rank]))
    return found


def waiting(spans: Sequence[Span]) -> float:
    """Returns the time that ranks wait within a step, relative to the time that they compute."""
    computing = sum(span.end - span.start for span in spans)
    return max(span.end for span in spans) * len({span.rank for span in spans}) / computing - 1


def _done(work: Work) -> Work:
    """Returns the part of `work` that other passes wait for; for a backward pass, the gradients of its inputs."""
    return replace(work, kind=OF_INPUTS) if work.kind == BACKWARD else work


def _before(work: Work, last: int) -> set[Work]:
    """Returns the work that a pass waits for."""
    if work.kind == OF_WEIGHTS:
        return {replace(work, kind=OF_INPUTS)}
    if work.kind == FORWARD:
        return {replace(work, stage=work.stage - 1)} if work.stage else set()
    behind = {Work(OF_INPUTS, work.stage + 1, work.micro_batch)} if work.stage < last else set()
    return {replace(work, kind=FORWARD), *behind}


def _order(config: ParallelConfig, count: int, rank: int) -> list[Work]:
    """Returns the work of a rank in a step, in order; that of several stages a rank is torch's.

    Torch's own order of 1F1B numbers the micro-batches of the last stage from 1.
    """
    if config.num_stages > config.pipeline:
        return [
            Work(action.computation_type.name, action.stage_index, action.microbatch_index)
            for action in get_schedule_ops(SCHEDULES[config.schedule], config.pipeline, count)[rank]
            if action is not None and action.microbatch_index is not None
        ]
    ahead = count if config.schedule == "gpipe" else min(count, config.pipeline - 1 - rank)
    forward = [Work(FORWARD, rank, number) for number in range(count)]
    backward = [Work(BACKWARD, rank, number) for number in range(count)]
    turns = [work for pair in zip(forward[ahead:], backward, strict=False) for work in pair]
    return [*forward[:ahead], *turns, *backward[count - ahead :]]
