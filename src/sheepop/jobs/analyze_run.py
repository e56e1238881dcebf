"""Analyses of a training run at one of its checkpoints, in memory: nothing in its directory changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sheepop.checkpoint.run_directory import STATE
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, UsageError, first_few
from sheepop.core.random import seed_torch, torch_generator
from sheepop.interpret.control.curvature import rows_of
from sheepop.interpret.control.finding import Finding
from sheepop.interpret.control.layers import layer_health, update_ratios
from sheepop.interpret.control.noise import NoiseSample, NoiseScale
from sheepop.interpret.control.operating_point import require_finite
from sheepop.interpret.control.stability import (
    NoiseFinding,
    SharpnessFinding,
    StepResponse,
    loss_along,
    measure_sharpness,
)
from sheepop.interpret.control.watching import noise_sample, tables_of, trained_weights, way_from
from sheepop.jobs.analyze import require_no_result, write_finding
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.analysis import obstacle
from sheepop.jobs.run.build import Parts, build_parts, schedule_of
from sheepop.jobs.run.open import find_resumable, followed
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.model import Transformer
from sheepop.train import TrainingState
from sheepop.train.optimizers.groups import set_learning_rate
from sheepop.train.step import StepRunner

Found = TypeVar("Found", bound=Finding)
_NOTE = "Weights and activations are float32, dropout is off, and attention is computed step by step."
MOST_PRODUCTS = 14
_FEWEST_BATCHES = 2


@dataclass(frozen=True)
class RunAnalysisRequest:
    """A run to analyse at its checkpoint of `step` (None: the newest), and where to write the result.

    `learning_rate` replaces the rate of the step.
    """

    run: Path
    output: Path | None = None
    step: int | None = None
    learning_rate: float | None = None
    device: str = "auto"
    overwrite: bool = False


@dataclass
class StoppedRun:
    """A run at one of its checkpoints, before its next step, at the `rate` of its last one unless another was given."""

    config: SheepOpConfig
    parts: Parts
    state: TrainingState
    rate: float

    @property
    def model(self) -> Transformer:
        """The network with the weights that are trained."""
        return self.parts.model


def analyze_run(request: RunAnalysisRequest, verb: str, analysis: Callable[[StoppedRun], Found]) -> Found:
    """Runs an analysis of a run and writes its result; raises `OutputError` if one is there already."""
    require_no_result(request.output, verb, overwrite=request.overwrite)
    found = analysis(reopen(request, verb))
    if request.output is not None:
        write_finding(found, request.output)
    return found


def reopen(request: RunAnalysisRequest, quantity: str) -> StoppedRun:
    """Loads a run at a checkpoint, to measure a `quantity`.

    Raises `UsageError` for a path without a run, a step without a checkpoint, or a run on which the quantity cannot be
    measured, and `CheckpointError` for a checkpoint without the state of the optimizer or with weights that are not
    finite.
    """
    stored = find_resumable(request.run)
    if stored is None:
        raise UsageError(
            f"{request.run} is not a training run, so it has no optimizer and no data whose next step could be "
            "measured. Give a run directory, which `sheepop train` writes."
        )
    # A checkpoint of several ranks holds whole tensors, so one process can read it.
    config = stored.config.replace(device=request.device, parallel={})
    if (why := obstacle(config, (quantity,))) is not None:
        raise UsageError(f"{quantity.capitalize()} cannot be measured on {request.run}. {why}")
    device = prepare_process(config)
    opened = followed(
        RunRequest({"output_dir": str(request.run)}, uses_recipe=False, console=Console.silent()), device, resumes=True
    )
    steps = opened.directory.steps()
    step = request.step if request.step is not None else max(steps, default=None)
    if step is None or step not in steps:
        known = first_few([f"{each:,}" for each in steps], len(steps)) or "none"
        raise UsageError(f"{request.run} has no checkpoint of step {step}. Its checkpoints are of the steps: {known}.")
    checkpoint = opened.directory.checkpoint(step)
    if not (checkpoint / STATE).is_dir():
        raise CheckpointError(
            f"{checkpoint} has no folder {STATE}/ with the state of the optimizer, so its next step cannot be "
            "measured. Use another --step."
        )
    parts = build_parts(opened, None)
    state = parts.checkpointer.load(step)
    for name, weight in parts.model.named_parameters():
        require_finite(name, weight, "there is nothing to measure. Use another --step.")
    last = max(0, state.step - 1)  # since the next step may have no rate
    place = config.training.resolved().pace.place(last)
    rate = schedule_of(config.training)(place) if request.learning_rate is None else request.learning_rate
    set_learning_rate(parts.optimizers, rate)
    return StoppedRun(config, parts, state, rate)


def sharpness_of(run: StoppedRun, *, rows: int | None = None, products: int = MOST_PRODUCTS) -> SharpnessFinding:
    """The sharpness of a run before its next step, and that step.

    It is measured on `rows` rows of the batch, by default half of it, and at most those of a micro-batch. Raises
    `CheckpointError` for a run whose loss is not finite.
    """
    parts, config = run.parts, run.config
    prepared = parts.source.prepare(run.state.batch_number)
    device = parts.placement.device
    first = prepared.micro_batches[0].to(device)
    batch = rows_of(first, slice(0, rows or max(2, config.training.global_batch_size // 2)))
    with parts.placement.evaluating():
        sharpness = measure_sharpness(
            run.model,
            parts.optimizers,
            batch,
            torch_generator(config.seed, "sharpness", run.state.step),
            iterations=products,
        )
    _require_finite("curvature", sharpness.share, run)
    before = trained_weights(run.model)
    runner = StepRunner(
        parts.placement, parts.objective, parts.optimizers, parts.evaluation, config.training.max_grad_norm
    )
    runner.take(
        prepared,
        number=run.state.step,
        rate=run.rate,
        before_forward=lambda number: seed_torch(config.seed, "dropout", run.state.step, number),
    )
    update = way_from(before, run.model)
    with parts.placement.evaluating():
        response = StepResponse.of(loss_along(run.model, before, update, batch))
        health = layer_health(run.model, batch)
    return SharpnessFinding(
        _notes(sharpness.left_out),
        run.state.step,
        run.rate,
        config.training.learning_rate,
        sharpness,
        response,
        update_ratios(before, update),
        health,
    )


def noise_of(run: StoppedRun, *, batches: int = 8) -> NoiseFinding:
    """The noise scale of a run over its next `batches` batches.

    Raises `UsageError` if these cannot tell it, and `CheckpointError` for a run whose loss is not finite.
    """
    if batches < _FEWEST_BATCHES:
        raise UsageError(f"--batches = {batches}, but an interval needs at least {_FEWEST_BATCHES}.")
    parts, samples = run.parts, list[NoiseSample]()
    for number in range(batches):
        prepared = parts.source.prepare(run.state.batch_number + number)
        micro_batches = [batch.to(parts.placement.device) for batch in prepared.micro_batches]
        with parts.placement.evaluating():
            sample = noise_sample(run.model, micro_batches)
        if sample is None:
            raise UsageError("The batches of this run have one row, so the noise between rows cannot be seen in them.")
        _require_finite("gradient", sample.noise, run)
        samples.append(sample)
    size = run.config.training.global_batch_size
    return NoiseFinding(_notes(tables_of(run.model)), run.state.step, size, samples, NoiseScale.of(samples))


def _require_finite(what: str, number: float, run: StoppedRun) -> None:
    if not math.isfinite(number):
        raise CheckpointError(
            f"The {what} of the loss at step {run.state.step:,} is not finite: the run has diverged, and there is "
            "nothing to measure. Use another --step."
        )


def _notes(left_out: Sequence[str]) -> tuple[str, ...]:
    if not left_out:
        return (_NOTE,)
    return _NOTE, f"Tables of n-grams are kept fixed: {', '.join(left_out)}."
