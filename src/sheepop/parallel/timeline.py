"""When each rank of a pipeline computes what, in units of time, if nothing else takes any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.pipeline import SCHEDULES_OF_STAGES

FORWARD, BACKWARD, OF_INPUTS, OF_WEIGHTS = "forward", "backward", "of inputs", "of weights"
_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": OF_INPUTS,
    "BACKWARD_WEIGHT": OF_WEIGHTS,
}
# Going back takes twice the time of going forwards: as much for gradients of inputs as for those of weights.
_UNITS = {FORWARD: 1.0, BACKWARD: 2.0, OF_INPUTS: 1.0, OF_WEIGHTS: 1.0}


@dataclass(frozen=True)
class Work:
    """A pass of a micro-batch through a stage: `kind` is forwards, backwards, or one of the two halves of that."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Span:
    """What a rank of a pipeline does from `start` to `end`; 1 is its forward pass of one micro-batch."""

    rank: int
    work: Work
    start: float
    end: float


def timeline(config: ParallelConfig, count: int) -> list[Span]:
    """All spans of a step of `count` micro-batches in the order of `config.schedule`, each as early as can be.

    A pass forwards waits for the stage before it, one backwards for the stage behind it.
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
    """The time that ranks wait within a step, relative to the time that they compute."""
    computing = sum(span.end - span.start for span in spans)
    return max(span.end for span in spans) * len({span.rank for span in spans}) / computing - 1


def _done(work: Work) -> Work:
    """What others wait for: of a whole pass backwards the gradients of its inputs."""
    return replace(work, kind=OF_INPUTS) if work.kind == BACKWARD else work


def _before(work: Work, last: int) -> set[Work]:
    """What a pass waits for."""
    if work.kind == OF_WEIGHTS:
        return {replace(work, kind=OF_INPUTS)}
    if work.kind == FORWARD:
        return {replace(work, stage=work.stage - 1)} if work.stage else set()
    behind = {Work(OF_INPUTS, work.stage + 1, work.micro_batch)} if work.stage < last else set()
    return {replace(work, kind=FORWARD), *behind}


def _order(config: ParallelConfig, count: int, rank: int) -> list[Work]:
    """What a rank computes in a step, one after the other."""
    if config.schedule in SCHEDULES_OF_STAGES:
        return _order_of_more(config, count, rank)
    ahead = count if config.schedule == "gpipe" else min(count, config.pipeline - 1 - rank)
    forward = [Work(FORWARD, rank, number) for number in range(count)]
    backward = [Work(BACKWARD, rank, number) for number in range(count)]
    turns = [work for pair in zip(forward[ahead:], backward, strict=False) for work in pair]
    return [*forward[:ahead], *turns, *backward[count - ahead :]]


def _order_of_more(config: ParallelConfig, count: int, rank: int) -> list[Work]:
    """That of torch, whose schedules of several stages a rank make it for all ranks when they are made."""
    about = {"num_stages": config.num_stages, "group_size": config.pipeline, "group_rank": rank, "is_last": False}
    stages: Any = [SimpleNamespace(submod=nn.Identity(), stage_index=number, **about) for number in range(2)]
    actions = SCHEDULES_OF_STAGES[config.schedule](stages, count).pipeline_order[rank]
    return [
        Work(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None and action.microbatch_index is not None
    ]
