"""The coordinate check of a run or a recipe: the same network at several widths, each trained for a few steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.core.random import seed_torch
from sheepop.data import BatchSchedule, RowSource, SampleOrder
from sheepop.data.batch_schedule import Stages
from sheepop.interpret.control.coordinates import Coordinates, activations_of, coordinates, usual_widths, widened
from sheepop.jobs.analyze import require_no_result, write_finding
from sheepop.jobs.run.analysis import obstacle
from sheepop.jobs.run.open import find_resumable, followed, task_of, with_local_data
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.jobs.task.interface import Task
from sheepop.model import ModelConfig, build_model
from sheepop.train.budget import runner_here
from sheepop.train.source import ScheduledSource

_PURPOSE = "coordinates"


@dataclass(frozen=True)
class CoordinatesRequest:
    """A run directory, or a config file with `options` and ``key=value`` `overrides`, and what to compare.

    Without `widths` they are those of `usual_widths`, and without `learning_rate` it is that of the run, without
    warm-up.
    """

    source: Path
    widths: Sequence[int] = ()
    steps: int = 5
    learning_rate: float | None = None
    output: Path | None = None
    overwrite: bool = False
    overrides: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    console: Console = field(default_factory=Console.silent)


def check_coordinates(request: CoordinatesRequest) -> Coordinates:
    """Trains the network at each width for a few steps on the data of the run, and compares activations.

    Starts and changes no run. Raises `UsageError` for a source that is no run and no config file, or a run with
    another loss than that of the next token, and `ConfigError` for a width that the network cannot have.
    """
    require_no_result(request.output, Coordinates.verb, overwrite=request.overwrite)
    with tempfile.TemporaryDirectory(prefix="sheepop-coordinates-") as scratch:
        task, device = _task(request, Path(scratch))
        if (why := obstacle(task.config, (_PURPOSE,))) is not None:
            raise UsageError(f"Coordinates of {request.source} cannot be compared. {why}")
        model, training = task.config.model, task.config.training
        widths = request.widths or usual_widths(model)
        networks = {width: widened(model, width) for width in widths}
        rate = training.learning_rate if request.learning_rate is None else request.learning_rate
        if not rate > 0:
            raise UsageError(f"The learning rate is {rate:g}, so nothing would change. Give --learning-rate above 0.")
        passes = len(networks) * (request.steps + 1)  # one before the first step, and one after each
        with request.console.progress("Comparing", passes, "passes") as progress:

            def trial(width: int) -> Iterator[dict[str, Tensor]]:
                progress.describe(f"d_model {width}")
                for found in _trial(task, networks[width], request.steps, rate, device):
                    yield found
                    progress.advance()

            notes = (
                f"Every width trains for {counted(request.steps, 'step')} at the rate {rate:g} without warm-up, in "
                "float32, with the same seed and the same batches.",
            )
            found = coordinates(widths, trial, rate=rate, is_mup=model.initialization == "mup", notes=notes)
    if request.output is not None:
        write_finding(found, request.output)
    return found


def _task(request: CoordinatesRequest, scratch: Path) -> tuple[Task, str]:
    """The task of the run or config file, and the device to train on; the data of a config file go to `scratch`."""
    if (stored := find_resumable(request.source)) is not None:
        if request.overrides or "data" in request.options:
            raise UsageError(
                f"{request.source} is a run, which has its settings and data. Leave --data and KEY=VALUE out, or give "
                "a config file."
            )
        # One process trains the small networks here, on however many ranks the run was trained.
        here = stored.config.replace(device=request.options.get("device", "auto"), parallel={})
        device = prepare_process(here)
        opened = RunRequest({"output_dir": str(request.source)}, uses_recipe=False)
        return followed(opened, device, resumes=True).task, device
    if not request.source.is_file():
        raise UsageError(f"{request.source} is neither a run directory nor a config file.")
    wanted = RunRequest.of(
        request.options, overrides=request.overrides, config=request.source, output=scratch, console=request.console
    )
    wanted = with_local_data(wanted)
    device = prepare_process(wanted.settings)
    task = task_of(wanted.completed().config, RunDirectory(scratch), request.console)
    return task.prepared(wanted.given).settled(), device


def _trial(task: Task, network: ModelConfig, steps: int, rate: float, device: str) -> Iterator[dict[str, Tensor]]:
    """The activations of a new network on the first batch, before its first step and after each."""
    config, objective, batches = task.config, task.objective(), task.batches()
    model, training, size = (
        build_model(network, config.seed, device),
        config.training,
        config.training.global_batch_size,
    )
    runner = runner_here(model, objective, training, "fp32", device)
    rows = RowSource(batches, SampleOrder(batches.num_samples, config.seed))
    schedule = BatchSchedule([rows], Stages((), size), Stages((), batches.max_length), config.seed)
    source = ScheduledSource(schedule, objective, training.micro_batch_size or size, device)
    seen = source.prepare(0).micro_batches[0].to(device)
    yield activations_of(model, seen)
    for step in range(steps):
        runner.take(
            source.prepare(step),
            number=step,
            rate=rate,
            before_forward=partial(seed_torch, config.seed, _PURPOSE, step),
        )
        yield activations_of(model, seen)
