"""The first steps of a run, taken to measure them, and one of each other thing that it does."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Self

import numpy as np
import psutil
import torch

from sheepop.core.json_lines import JsonLines
from sheepop.core.processor_time import ProcessorTime
from sheepop.core.speed import synchronize
from sheepop.jobs.run.build import Parts, build_parts
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.run.report import write_run_report
from sheepop.jobs.run.train import journey_of_run
from sheepop.jobs.task import Task
from sheepop.jobs.task.examples import ExampleTask
from sheepop.model import Transformer
from sheepop.model.accounting.live_bytes import LiveBytes
from sheepop.train import TrainingState
from sheepop.train.source import PreparedStep, ScheduledSource
from sheepop.train.step import StepRunner
from sheepop.train.validation import scored_samples

_LEAST_STEPS, _MOST_STEPS = 6, 400
_SCORING_SHARE = 0.5  # of the time for steps, for validations if not all held-out rows are scored in less
_SCORED_AT_FIRST = 128  # held-out rows; as many answers are written at a time


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps of a run showed.

    `tensors` is the peak of the bytes of tensors in two steps with the longest rows, and `process` that of the process
    in all of this, of which the report at the end added `drawing`; both are 0 on a GPU. `seconds` are those of the
    timed steps, which have `tokens` and `flops` each on average. `quiet` is the share of the processors that all this
    got beside other programs. `beginning` counts the seconds to build the network, and the warm-up of the first
    samples, evaluation and score. `checkpoint`, `samples`, `evaluations`, `scoring` and `report` are the seconds of one
    checkpoint, one later round of samples and of evaluations, one scored row, and the report; 0 for what the run does
    not do.
    """

    tensors: int
    is_finite: bool
    process: int = 0
    drawing: int = 0
    seconds: Sequence[float] = ()
    tokens: float = 0.0
    flops: float = 0.0
    quiet: float = 1.0
    beginning: float = 0.0
    checkpoint: float = 0.0
    samples: float = 0.0
    evaluations: float = 0.0
    scoring: float = 0.0
    report: float = 0.0

    @classmethod
    def of(cls, run: OpenRun, steps: int, seconds: float) -> Self:
        """Takes some of the `steps` of an open run, for about `seconds`; a checkpoint is written into its directory."""
        began = time.perf_counter()
        parts = build_parts(run, None)
        beginning = time.perf_counter() - began
        norm = run.config.training.max_grad_norm
        runner = StepRunner(parts.placement, parts.objective, parts.optimizers, parts.evaluation, norm)
        tensors, is_finite = _two_largest(runner, run.task, parts, run.device)
        if not is_finite:
            return cls(tensors, is_finite=False)
        processor = ProcessorTime()
        with processor.counted():
            times, tokens, flops = _timed(runner, parts, run.device, steps, seconds)
            checkpoint = _seconds_of_checkpoint(run, parts)
            with parts.evaluation.applied(), parts.placement.evaluating():
                scoring, more = _seconds_a_row(run, parts, _SCORING_SHARE * seconds)
                sample = run.task.samples(parts.model, run.device)
                evaluate = run.task.evaluations(parts.model, run.device)
                rounds = [
                    first_and_later(work, _SCORING_SHARE * seconds)
                    for work in (None if sample is None else partial(sample, 0), evaluate)
                ]
            before = _resident(run.device)
            report = _seconds_of(partial(_write_report, run, parts.model))
        (samples, more_of_samples), (evaluations, more_of_evaluations) = rounds
        beginning += more + more_of_samples + more_of_evaluations
        quiet = processor.take() if run.device == "cpu" else 1.0
        # Memory that is freed stays with the process (`keep_freed_memory`), so this is its peak.
        process = _resident(run.device)
        return cls(
            tensors, True, process, process - before, times, tokens, flops, quiet, beginning, checkpoint, samples,
            evaluations, scoring, report,
        )  # fmt: skip


def _resident(device: str) -> int:
    """The bytes of the process; 0 on a GPU, whose memory is another one."""
    return int(psutil.Process().memory_info().rss) if device == "cpu" else 0


def _write_report(run: OpenRun, model: Transformer) -> None:
    """Writes the report of the run, as its end does; the libraries that draw load, too.

    Of what it draws, only the kinds of curves matter here, so all of them have the same two points.
    """
    numbers = ("loss", "bits_per_byte", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "seconds")
    points = [{"step": step, **dict.fromkeys(numbers, float(step))} for step in (1, 2)]
    with closing(JsonLines(run.directory.metrics_file, 0)) as log:
        for split in ("train", "validation"):
            for point in points:
                log.append({**point, "split": split})
    write_run_report(run.directory, run.config, None, run.record, run.task.manifest, journey=journey_of_run(run, model))


def _two_largest(runner: StepRunner, task: Task, parts: Parts, device: str) -> tuple[int, bool]:
    """Takes two steps with the longest rows; each has two micro-batches if the steps of the run have several.

    Returns their peak, and whether both were finite.
    """
    batches, training = task.batches(), task.config.training.resolved()
    rows, order = training.micro_batch_size, np.arange(batches.num_samples)
    if isinstance(task, ExampleTask) and batches.num_samples % len(task.store.train.lengths) == 0:
        order = np.argsort(-np.resize(task.store.train.lengths, batches.num_samples), kind="stable")
    chosen = np.resize(order, min(2 * rows, task.config.training.global_batch_size)).astype(np.int64)
    prepared = PreparedStep.of(batches.batch(chosen), rows, parts.objective, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        is_finite = _take_two(runner, prepared)
        return torch.cuda.max_memory_allocated(), is_finite
    with LiveBytes() as live:
        # A reference is read when answers are written, and is there all the time.
        for model in (parts.model, getattr(parts.source, "reference", None)):
            for parameter in () if model is None else model.parameters():
                live.add(parameter)
        is_finite = _take_two(runner, prepared)
    return live.peak, is_finite


def _take_two(runner: StepRunner, prepared: PreparedStep) -> bool:
    return runner.take(prepared, number=0).is_taken and runner.take(prepared, number=1).is_taken


def _timed(
    runner: StepRunner, parts: Parts, device: str, steps: int, seconds: float
) -> tuple[list[float], float, float]:
    """Times steps as the run takes them, in whole rollouts if it writes answers; also mean tokens and operations.

    The steps of a schedule are taken from all parts of the run, because those of a warm-up are smaller.
    """
    turn = int(getattr(parts.source, "steps_per_rollout", 1))
    is_scheduled = isinstance(parts.source, ScheduledSource)
    times, tokens, flops, number, until = list[float](), 0.0, 0.0, 0, time.monotonic() + seconds
    while number < _MOST_STEPS and (len(times) < _LEAST_STEPS or time.monotonic() < until):
        began = time.perf_counter()
        for _ in range(turn):
            prepared = parts.source.prepare(int(_spread(number) * steps) if is_scheduled else number)
            runner.take(prepared, number=number)
            tokens, flops = tokens + prepared.num_reported, flops + parts.throughput.flops_of(prepared)
            number += 1
        synchronize(device)
        if number > turn:  # the first one is for warming up
            times.append((time.perf_counter() - began) / turn)
    return times, tokens / number, flops / number


def _spread(number: int) -> float:
    """Point `number` of a sequence that fills the numbers from 0 to 1 evenly: van der Corput's, to the base 2."""
    place, part = 0.0, 0.5
    while number:
        place, part, number = place + part * (number % 2), part / 2, number // 2
    return place


def _seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def first_and_later(work: Callable[[], object] | None, seconds: float) -> tuple[float, float]:
    """The mean seconds of later calls, and those that the first takes more; calls begin within `seconds`.

    A single call would say how fast the machine is at that moment.
    """
    if work is None:
        return 0.0, 0.0
    times = [_seconds_of(work)]
    while sum(times) < seconds:
        times.append(_seconds_of(work))
    later = fmean(times[1:] or times)
    return later, max(0.0, times[0] - later)


def _seconds_of_checkpoint(run: OpenRun, parts: Parts) -> float:
    """The seconds to copy the state and to write it; 0 if the temporary directory may not have room for it."""
    moments = [each for optimizer in parts.optimizers for state in optimizer.state.values() for each in state.values()]
    tensors = [*parts.model.parameters(), *moments]
    needed = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
    if 2 * needed > shutil.disk_usage(run.directory.path).free:
        return 0.0

    def save() -> None:
        parts.checkpointer.save(TrainingState())
        parts.checkpointer.wait()

    try:
        return _seconds_of(save)
    finally:
        parts.checkpointer.close()


def _seconds_a_row(run: OpenRun, parts: Parts, seconds: float) -> tuple[float, float]:
    """The seconds to score a held-out row, and those that the first time takes more; 0 without any.

    They are measured on all rows or on as many as fit.
    """
    held_out = run.task.held_out()
    if held_out is None:
        return 0.0, 0.0
    count, more = min(held_out.num_samples, _SCORED_AT_FIRST), None
    while True:
        most = math.ceil(count * held_out.tokens_per_sample)
        score = partial(run.task.score, parts.model, held_out, run.device, max_tokens=most)
        later, first = first_and_later(score, seconds if more is None else 0.0)
        more = first if more is None else more
        found, scored = later / len(scored_samples(held_out, most)), count
        count = min(held_out.num_samples, int(seconds / found))
        if count < 2 * scored:
            return found, more
