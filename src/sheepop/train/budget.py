"""Turns the budgets of a run into steps and chooses its precision, compilation and intervals.

The results are written into the run's configuration, so that a resumed run does not measure again.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import psutil

from sheepop.core.console import Console
from sheepop.core.facts import plural
from sheepop.core.measurements import measurement_key, recall, remember
from sheepop.core.processor_time import ProcessorTime
from sheepop.core.speed import processor_share, synchronize
from sheepop.data import Batches
from sheepop.model import Transformer
from sheepop.model.fused import fuses
from sheepop.train.config import TrainingConfig
from sheepop.train.evaluation_weights import build_evaluation_weights
from sheepop.train.objective import Objective
from sheepop.train.optimizers.build import build_optimizers, optimizer_settings
from sheepop.train.placement import OneDevice
from sheepop.train.precision import candidates
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.trouble import Limits

_WARMUP_SHARE = 0.05
_DECAY_SHARE = 0.2
_MEASURE_SHARE = 0.01  # of a budget in minutes, whose number of steps follows the clock later
_LEAST_MEASURING_SECONDS, _MOST_MEASURING_SECONDS = 2.0, 30.0
_TRAINING_SHARE = 0.5  # of a budget in minutes, at least, however long everything else takes
_NOTED = 0.02  # a run that takes longer than its minutes by a larger share says so
_FORWARD_SHARE = 1 / 3  # the cost of a forward pass in training steps, about
_MOST_VALIDATIONS = 10
VALIDATION_SHARE = 0.2  # of a budget in minutes, at most; likewise for the score at the end
_REPORT_SECONDS = 4.0  # the last samples and the report
# Of a memory: to train its gate, to index a token twice, and to look up a held-out token. Two cores of 2.5 GHz.
_GATE_SECONDS, _INDEX_SECONDS, _RECALL_SECONDS = 14.0, 1.5e-6, 3e-5
_IDLE_SECONDS = 3.0  # checkpoints, samples and plots of a short run
_LEAST_STEPS, _LEAST_COMPARED_STEPS = 3, 6  # timed steps of a candidate alone, and of each when several are compared
_LONG_SECONDS = 1.0  # a longer step averages the noise of a machine by itself, so three are enough
_MANY_OPERATIONS = 1e11  # about a second of a CPU
_GROUPS = 3
_LEAST_GAIN = 0.05  # a less exact candidate must save this share of a step


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step in one precision, compiled or not.

    `measured_in` are the seconds that measuring took; for the budget of a run, all that it needs besides its loop.
    """

    precision: str
    seconds: float
    compiled: bool = False
    measured_in: float = field(default=0.0, compare=False)
    compiled_in: float = field(default=0.0, compare=False)  # the extra seconds of a run's first step

    def __str__(self) -> str:
        return f"{self.precision}{' compiled' if self.compiled else ''} {self.seconds * 1000:,.0f} ms"


def measure_step(
    make_model: Callable[[], Transformer],
    batches: Batches,
    objective: Objective,
    config: TrainingConfig,
    device: str,
    *,
    seconds: float,
    console: Console,
    shape: str | None = None,
) -> StepTime:
    """Times optimizer steps of throw-away models in every candidate precision; returns the one that `fastest` chooses.

    If `config.compile` is ``auto`` the chosen precision is timed compiled too. The candidates share `seconds`, each
    with two seconds at least, after two untimed steps, the first of which compiles. `shape` identifies all that decides
    how long a step takes: a result that an earlier start measured for it is used again, None always measures. What is
    remembered is the time of a step on a quiet machine, by the share of its processors that this process got.
    """
    precisions, started = candidates(config.precision, device), time.monotonic()
    key = None if shape is None else measurement_key("training step", device, shape)
    known = None if key is None else recall(key, StepTime)
    if known is not None and known.precision in precisions:
        known = replace(known, seconds=known.seconds / processor_share(device))
        console.info(f"Using {known}, which an earlier start measured for one step.{_how_to_fix(config, known)}")
        return replace(known, measured_in=0.0)
    share = max(_LEAST_MEASURING_SECONDS, seconds / (len(precisions) + (config.compile == "auto")))

    timings: list[StepTime] = []
    times: list[list[float]] = []
    processor = ProcessorTime()

    def time_candidates(names: Sequence[str], compiled: bool) -> None:
        with processor.counted():
            runs = _time_steps(make_model, batches, objective, config, device, names, share, compiled, console)
        for name, (first, _, *timed) in zip(names, runs, strict=True):
            median = statistics.median(timed)
            timings.append(StepTime(name, median, compiled, compiled_in=first - median if compiled else 0.0))
            times.append(timed)

    time_candidates(precisions, config.compile is True)
    if config.compile == "auto":
        time_candidates([timings[fastest(times)].precision], True)
    chosen = timings[fastest(times)]
    measured = ", ".join(map(str, timings))
    is_sure = chosen.seconds <= min(timing.seconds for timing in timings)
    doubt = "" if is_sure else ", as the times vary too much to say that another is faster"
    console.info(f"Measured one step: {measured}. Using {chosen}{doubt}.{_how_to_fix(config, chosen)}")
    if key is not None:
        quiet = processor.take() if device == "cpu" else 1.0
        remember(key, replace(chosen, seconds=chosen.seconds * quiet))
    return replace(chosen, measured_in=time.monotonic() - started)


def runner_here(
    model: Transformer,
    objective: Objective,
    config: TrainingConfig,
    precision: str,
    device: str,
    *,
    compiled: bool = False,
) -> StepRunner:
    """Takes steps of a throw-away model on one device, for a measurement or a test."""
    optimizers = build_optimizers(model, config)
    placement = OneDevice(model, precision=precision, device=device, compiled=compiled)
    evaluation = build_evaluation_weights(model, optimizers, config)
    return StepRunner(placement, objective, optimizers, evaluation, config.max_grad_norm)


def fastest(times: Sequence[Sequence[float]]) -> int:
    """Returns the index of the candidate to use, from the measured seconds of each; a later one must be clearly faster.

    The candidates are in order of exactness, float32 first. The times of a later one are dealt into three groups; it is
    clearly faster if the best time of every group is more than 5 percent below the best time of the candidate chosen so
    far. The best time counts because another program can only make a step slower.
    """
    chosen = 0
    for number, seconds in enumerate(times):
        bests = [min(group) for start in range(_GROUPS) if (group := seconds[start::_GROUPS])]
        if max(bests) < (1 - _LEAST_GAIN) * min(times[chosen]):
            chosen = number
    return chosen


def _how_to_fix(config: TrainingConfig, chosen: StepTime) -> str:
    """A sentence with the settings that make every start choose alike, or nothing if they are set."""
    settings = [f"training.precision={chosen.precision}"] if config.precision == "auto" else []
    if config.compile == "auto":
        settings.append(f"training.compile={str(chosen.compiled).lower()}")
    return f" To always use it: {' '.join(settings)}." if settings else ""


def resolve_compile(config: TrainingConfig, device: str) -> TrainingConfig:
    """Replaces a `compile` of null: by ``auto`` on a GPU with Triton, else by false.

    On a GPU a block that is not compiled reads and writes memory for every operation. On a CPU most of a step is matrix
    products, so compiling seldom saves time.
    """
    if config.compile is not None:
        return config
    return config.replace(compile="auto" if fuses(device) else False)


def needs_measuring(config: TrainingConfig, device: str) -> bool:
    """Whether the number of steps depends on how fast this machine is."""
    return config.max_minutes is not None or config.compile == "auto" or len(candidates(config.precision, device)) > 1


def measuring_seconds(config: TrainingConfig) -> float:
    """The seconds to spend on measuring: a small share of the budget in minutes, at most half a minute."""
    share = 0.0 if config.max_minutes is None else config.max_minutes * 60 * _MEASURE_SHARE
    return max(_LEAST_MEASURING_SECONDS, min(share, _MOST_MEASURING_SECONDS))


def loop_seconds(config: TrainingConfig, timing: StepTime | None) -> float | None:
    """Returns the seconds of a budget in minutes that remain for the loop; None without such a budget."""
    if config.max_minutes is None or timing is None:
        return None
    return _left(config.max_minutes, timing.measured_in)


def _left(minutes: float, used: float) -> float:
    """Returns the seconds of a budget for training, which are half of it at least."""
    return max(_TRAINING_SHARE * minutes * 60, minutes * 60 - used)


def scoring_seconds(config: TrainingConfig, timing: StepTime, tokens: float, seq_len: float) -> float:
    """The approximate seconds of a forward pass over this many `tokens`, in rows that count as `seq_len` tokens."""
    return tokens / (config.global_batch_size * seq_len) * timing.seconds * _FORWARD_SHARE


def besides_the_loop(
    config: TrainingConfig,
    timing: StepTime | None,
    elapsed: float,
    held_out: int,
    seq_len: float,
    console: Console,
    num_tokens: float = 0.0,
) -> tuple[StepTime | None, int | None]:
    """`timing` with all that a budget in minutes pays for besides the loop, and the held-out tokens of the last score.

    These are `elapsed` seconds so far, some for the report, those for a memory of `num_tokens` training tokens, and the
    score of all `held_out` tokens (None), or of as many as a fifth of the minutes allow. A line says how long the run
    takes, also if that is longer than asked for because training gets half of the minutes at least.
    """
    if timing is None or config.max_minutes is None:
        return timing, None
    seconds, most = scoring_seconds(config, timing, held_out, seq_len), 60 * VALIDATION_SHARE * config.max_minutes
    if config.memory is not None:
        seconds = 2 * seconds + _RECALL_SECONDS * held_out
    scored = None if seconds <= most else max(1, int(held_out * most / seconds))
    part = "" if scored is None else f", on {scored:,} of {held_out:,} held-out tokens"
    minutes, after = config.max_minutes, min(seconds, most) + _REPORT_SECONDS
    if config.memory is not None:
        after += _GATE_SECONDS + _INDEX_SECONDS * min(num_tokens, config.memory.max_tokens)
    training = _left(minutes, elapsed + after)
    total = elapsed + training + after
    longer = "" if total <= (1 + _NOTED) * 60 * minutes else f", so the run takes about {total:,.0f} s in all"
    console.info(
        f"Of {minutes:g} {plural(minutes, 'minute')}, {elapsed:,.0f} s were used to prepare the run, training has "
        f"{training:,.0f} s, and the score and the report need about {after:,.0f} s{part}{longer}."
    )
    return replace(timing, measured_in=elapsed + after), scored


def most_steps(config: TrainingConfig, num_samples: int, seq_len: float) -> int | None:
    """The number of steps that the budgets other than minutes allow; None without such a budget."""
    sizes, limits = config.batch_sizes(), []
    if config.max_steps is not None:
        limits.append(config.max_steps)
    if config.max_epochs is not None:
        limits.append(sizes.steps_to(config.max_epochs * num_samples))
    if config.max_tokens is not None:
        limits.append(sizes.steps_to(config.max_tokens / seq_len))
    return min(limits) if limits else None


def resolve_training(
    config: TrainingConfig,
    timing: StepTime | None,
    *,
    device: str,
    num_samples: int,
    seq_len: float,
    validation_tokens: int,
) -> TrainingConfig:
    """Fills in every null of `config` that the loop needs; a budget in minutes needs `timing`.

    All budgets become `max_steps`, so a run from the result takes equally many steps on any machine.
    """
    precision = timing.precision if timing is not None else candidates(config.precision, device)[0]
    validations, limits = _MOST_VALIDATIONS, [most_steps(config, num_samples, seq_len)]
    if config.max_minutes is not None:
        if timing is None:
            raise ValueError("a budget in minutes needs a measured step time")
        fitting, validations = _fitting(config, config.max_minutes, timing, seq_len, validation_tokens)
        limits.append(fitting)
    steps = min([limit for limit in limits if limit is not None], default=config.batch_sizes().steps_to(num_samples))
    settings = optimizer_settings(config)
    derived = {
        "eval_interval": max(1, round(steps / validations)),
        "sample_interval": max(1, round(steps / 5)),
        "checkpoint_interval": max(1, round(steps / 10)),
    }
    open_intervals = {name: steps for name, steps in derived.items() if getattr(config, name) is None}
    return config.replace(
        max_steps=steps,
        max_epochs=None,
        max_tokens=None,
        max_minutes=None,
        precision=precision,
        compile=(config.compile or False) if timing is None else timing.compiled,
        warmup_steps=_warmup_steps(config, steps),
        decay_steps=_decay_steps(config, steps),
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.momentum,
        micro_batch_size=config.micro_batch_size or config.global_batch_size,
        **open_intervals,
        paced_intervals=config.paced_intervals if config.max_minutes is None else tuple(open_intervals),
    )


def _warmup_steps(config: TrainingConfig, steps: int) -> int:
    if config.warmup_steps is not None:
        return config.warmup_steps
    # The points of a piecewise schedule contain its warm-up.
    if config.schedule == "piecewise":
        return 0
    # The decay of wsd needs at least one step.
    room = steps - (config.decay_steps or 1) if config.schedule == "wsd" else steps
    return max(0, min(room, math.ceil(steps * _WARMUP_SHARE)))


def _decay_steps(config: TrainingConfig, steps: int) -> int | None:
    if config.schedule != "wsd" or config.decay_steps is not None:
        return config.decay_steps
    return max(1, min(math.ceil(steps * _DECAY_SHARE), steps - _warmup_steps(config, steps)))


def _fitting(
    config: TrainingConfig, minutes: float, timing: StepTime, seq_len: float, validation_tokens: int
) -> tuple[int, int]:
    """The most steps that fit into the minutes, at least one, and the number of their validations.

    There are ten validations, or in a short run as many as fit into a fifth of its minutes, at least one. A smaller
    batch counts as a share of a step.
    """
    sizes, left = config.batch_sizes(), minutes * 60 - timing.measured_in - timing.compiled_in - _IDLE_SECONDS
    available = max(_TRAINING_SHARE * minutes * 60, left)
    per_validation = scoring_seconds(config, timing, validation_tokens, seq_len)
    validations = _MOST_VALIDATIONS
    if validation_tokens:
        validations = max(1, min(_MOST_VALIDATIONS, int(available * VALIDATION_SHARE / per_validation)))

    def seconds(steps: int) -> float:
        count = validations if config.eval_interval is None else steps / config.eval_interval
        return sizes.total(steps) / config.global_batch_size * timing.seconds + count * per_validation

    most = 1
    while seconds(most) <= available:
        most *= 2
    return max(1, bisect_right(range(most), available, key=seconds) - 1), validations


def _time_steps(
    make_model: Callable[[], Transformer],
    batches: Batches,
    objective: Objective,
    config: TrainingConfig,
    device: str,
    precisions: Sequence[str],
    seconds: float,
    compiled: bool,
    console: Console,
) -> list[list[float]]:
    """Times steps of all precisions in turn, for `seconds` each after two steps; returns the seconds of every step.

    Of a step with several micro-batches it computes one, or a single row if that takes long, and multiplies the time of
    its gradients. If memory has no room for the states of several models, one precision is timed after the other.
    """

    def build_runner(precision: str) -> StepRunner:
        return runner_here(make_model(), objective, config, precision, device, compiled=compiled)

    runners = [build_runner(precisions[0])]
    if _have_room(runners[0], len(precisions) - 1):
        runners += [build_runner(precision) for precision in precisions[1:]]
    elif len(precisions) > 1:
        del runners
        apart = [[precision] for precision in precisions]
        one = (make_model, batches, objective, config, device)
        return [_time_steps(*one, precision, seconds, compiled, console)[0] for precision in apart]
    times: list[list[float]] = [[] for _ in precisions]
    whole = config.micro_batch_size or config.global_batch_size
    size, slowest = whole if compiled else 1, 0.0  # compiled blocks are for one shape
    weights = sum(parameter.numel() for parameter in runners[0].placement.model.parameters())
    if 6 * weights * batches.max_length > _MANY_OPERATIONS and device == "cpu":
        console.info(f"Timing a step in {' and '.join(precisions)}; training.precision=... skips this.")
    least = _LEAST_STEPS if len(runners) == 1 else _LEAST_COMPARED_STEPS
    number, started = -2, time.monotonic()
    while number < least or time.monotonic() - started < seconds * len(runners):
        samples = (max(0, number) * size + np.arange(size)) % batches.num_samples
        for own, runner in zip(times, runners, strict=True):
            begin = time.perf_counter()
            found = runner.gradients(PreparedStep.of(batches.batch(samples), size, objective, device=device))
            synchronize(device)
            between = time.perf_counter()
            runner.update(found, Limits(), number=max(0, number))
            synchronize(device)
            of_update = time.perf_counter() - between
            own.append((between - begin) * config.global_batch_size / size + of_update)
            slowest = max(slowest, between - begin)
        if number == -2 and slowest <= _LONG_SECONDS:
            size = whole
        if number == -2 and any(own[0] > _LONG_SECONDS for own in times):
            least = _LEAST_STEPS
        if number == -1:
            started = time.monotonic()
        number += 1
    return times


def _have_room(runner: StepRunner, more: int) -> bool:
    """Whether memory has room for the weights, gradients and two states of each weight of `more` such models."""
    weights = sum(parameter.numel() for parameter in runner.placement.model.parameters())
    return more * weights * 16 < psutil.virtual_memory().available
