"""The first steps of a run, taken to measure them: two with the longest rows, and those that are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from sheepop.core.speed import synchronize
from sheepop.jobs.run.build import Parts, build_parts
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.task import Task
from sheepop.jobs.task.examples import ExampleTask
from sheepop.model.accounting.live_bytes import LiveBytes
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner

_LEAST_STEPS, _MOST_STEPS = 6, 400
_SCORED_STEPS = 4  # a validation is timed on as many tokens as this many steps have


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a run showed.

    `tensors` is the peak of the bytes of tensors in two steps with the longest rows, `seconds` are those of the timed
    steps, which have `tokens` and `flops` each on average, and `validation` are the seconds to score a held-out token.
    """

    tensors: int
    is_finite: bool
    seconds: Sequence[float] = ()
    tokens: float = 0.0
    flops: float = 0.0
    validation: float = 0.0

    @classmethod
    def of(cls, run: OpenRun, seconds: float) -> Self:
        """Takes steps of an open run, for about `seconds`; nothing is saved."""
        parts = build_parts(run, None)
        norm = run.config.training.max_grad_norm
        runner = StepRunner(parts.placement, parts.objective, parts.optimizers, parts.evaluation, norm)
        tensors, is_finite = _two_largest(runner, run.task, parts, run.device)
        if not is_finite:
            return cls(tensors, is_finite=False)
        times, tokens, flops = _timed(runner, parts, run.device, seconds)
        validation = _seconds_a_token(run, parts, round(_SCORED_STEPS * tokens))
        return cls(tensors, True, times, tokens, flops, validation)


def _two_largest(runner: StepRunner, task: Task, parts: Parts, device: str) -> tuple[int, bool]:
    """Takes two steps of one micro-batch with the longest rows; returns their peak, and whether both were finite."""
    batches, rows = task.batches(), task.config.training.resolved().micro_batch_size
    order = np.arange(batches.num_samples)
    if isinstance(task, ExampleTask) and len(task.store.train.lengths) == batches.num_samples:
        order = np.argsort(-task.store.train.lengths, kind="stable")
    chosen = np.resize(order[:rows], rows).astype(np.int64)
    prepared = PreparedStep.of(batches.batch(chosen), rows, parts.objective, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        is_finite = _take_two(runner, prepared)
        return torch.cuda.max_memory_allocated(), is_finite
    with LiveBytes() as live:
        for parameter in parts.model.parameters():
            live.add(parameter)
        is_finite = _take_two(runner, prepared)
    return live.peak, is_finite


def _take_two(runner: StepRunner, prepared: PreparedStep) -> bool:
    return runner.take(prepared, number=0).is_taken and runner.take(prepared, number=1).is_taken


def _timed(runner: StepRunner, parts: Parts, device: str, seconds: float) -> tuple[list[float], float, float]:
    """Times steps as the run takes them, in whole rollouts if it writes answers; also mean tokens and operations."""
    turn = int(getattr(parts.source, "steps_per_rollout", 1))
    times, tokens, flops, number, until = list[float](), 0.0, 0.0, 0, time.monotonic() + seconds
    while number < _MOST_STEPS and (len(times) < _LEAST_STEPS or time.monotonic() < until):
        began = time.perf_counter()
        for _ in range(turn):
            prepared = parts.source.prepare(number)
            runner.take(prepared, number=number)
            tokens, flops = tokens + prepared.num_reported, flops + parts.throughput.flops_of(prepared)
            number += 1
        synchronize(device)
        if number > turn:  # the first one is for warming up
            times.append((time.perf_counter() - began) / turn)
    return times, tokens / number, flops / number


def _seconds_a_token(run: OpenRun, parts: Parts, tokens: int) -> float:
    """The seconds of a validation for each held-out token, measured on about `tokens` of them; 0 without any."""
    held_out = run.task.held_out()
    if held_out is None:
        return 0.0
    some = min(run.task.held_out_tokens, max(1, tokens))
    began = time.monotonic()
    run.task.score(parts.model, held_out, run.device, max_tokens=some)
    return (time.monotonic() - began) / some
