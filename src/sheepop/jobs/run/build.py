"""Builds the trainer of an open run: network, optimizers, data, checkpoints, logs."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ENDING_SIGNALS, CheckpointError, Interrupted, RanksError, StorageError
from sheepop.core.json_lines import JsonLines, NoLines
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.run.record import LAYOUT, resume_command
from sheepop.jobs.run.resolve import build_network
from sheepop.model import Transformer
from sheepop.model.accounting.operations import step_flops
from sheepop.parallel.layout import Layout
from sheepop.train import (
    Checkpointer,
    EvaluationWeights,
    Schedule,
    Scores,
    Trainer,
    TrainingState,
    build_evaluation_weights,
    build_optimizers,
)
from sheepop.train.agenda import EVALUATE, SAMPLE, VALIDATE, Agenda
from sheepop.train.journal import Journal, Throughput, is_verification
from sheepop.train.objective import Objective
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.precision import initial_loss_scale
from sheepop.train.profiler import AroundStep, StepProfiler, unobserved
from sheepop.train.schedule import Deadline
from sheepop.train.sinks import RunDescription, open_sinks
from sheepop.train.source import SharedSource, StepSource
from sheepop.train.step import Gradients, StepRunner


@dataclass(frozen=True)
class _Parts:
    """The parts of a trainer. `saves_the_beginning` is true if the seed alone does not give the initial weights."""

    model: Transformer
    adapters: int | None  # the weights of adapters, if only these are trained
    optimizers: Sequence[torch.optim.Optimizer]
    placement: Placement
    evaluation: EvaluationWeights
    objective: Objective
    source: StepSource
    checkpointer: Checkpointer
    saves_the_beginning: bool


@contextmanager
def build_trainer(run: OpenRun) -> Iterator[Trainer]:
    """Yields the trainer of a run, ready to start or to continue from its last good checkpoint, and closes its logs.

    An error within the block that leaves checkpoints says from which step the run can be resumed.
    """
    config, console, ranks, budget = run.config, run.console, run.request.ranks, run.record.deadline
    training, settings = config.training, config.training.resolved()
    begins_finished = run.record.forked_from is not None
    layout = Layout(ranks, config.parallel) if ranks.are_several else None
    parts = _build_parts(run, layout)
    sample = run.task.samples(parts.model, run.device)
    evaluate = run.task.evaluations(parts.model, run.device, ranks)
    fresh = TrainingState(loss_scale=initial_loss_scale(settings.precision))
    state = _restored(run, parts.checkpointer, fresh) if run.resumes else fresh
    _announce(run, parts.model, state)
    _keep_layout(run, parts.optimizers, layout)
    held_out = run.task.held_out()
    validate: Callable[[], Scores] | None = None
    if held_out is not None:
        validate = partial(
            run.task.score, parts.model, held_out, run.device, max_tokens=training.eval_tokens, ranks=ranks
        )
    if state is fresh:
        # A finished model is scored before it changes, so that the change can be seen.
        first = {VALIDATE: begins_finished and validate, EVALUATE: begins_finished and evaluate, SAMPLE: sample}
        state = state.after(due=tuple(name for name, work in first.items() if work))
        if VALIDATE in state.due:
            console.info("The model is scored as it is, before its first step.")
    with ExitStack() as stack:
        around_step, measure = _observers(run, layout, settings.total_steps - state.step, stack)
        trainer = Trainer(
            runner=StepRunner(
                parts.placement, parts.objective, parts.optimizers, parts.evaluation, training.max_grad_norm
            ),
            source=parts.source,
            agenda=Agenda.of(
                training,
                settings,
                validates=validate is not None,
                evaluates=evaluate is not None,
                evaluation_interval=config.evaluation.interval,
            ),
            schedule=Schedule(
                training.schedule,
                training.learning_rate,
                training.min_learning_rate,
                settings.warmup_steps,
                settings.pace.planned,
                settings.decay_steps,
                training.schedule_points or (),
            ),
            journal=_open_journal(run, parts.adapters, state, measure, stack),
            checkpointer=parts.checkpointer,
            validate=validate,
            # Others wait for the first rank at the next step.
            sample=sample if sample and ranks.is_first else (lambda step: []),
            evaluate=evaluate,
            seed=config.seed,
            keep_checkpoints=training.keep_checkpoints,
            trouble=training.trouble,
            state=state,
            deadline=Deadline(budget.seconds, budget.most_steps, run.write_pace) if budget else None,
            around_step=around_step,
            console=console,
            saves_the_beginning=parts.saves_the_beginning,
        )
        with _naming_the_last_checkpoint(run.directory), _ending_together(run):
            yield trainer


def _build_parts(run: OpenRun, layout: Layout | None) -> _Parts:
    """The network with all that trains and saves it, over the ranks of the `layout`."""
    task, config, ranks, device = run.task, run.config, run.request.ranks, run.device
    model = build_network(task, device)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    adapters = None if config.tuning.lora is None else sum(trained)
    # A run may have been killed before it saved its first weights.
    has_begun = run.resumes and bool(run.directory.steps())
    if task.origin is not None:
        task.origin.forget()
    begins = task.origin is not None or (ranks.is_first and not has_begun and task.begin(model))
    is_given = bool(ranks.told(begins))
    optimizers = build_optimizers(model, config.training)
    form = task.form(model, run.record.generation)
    settings = config.training.resolved()
    how: dict[str, Any] = {"precision": settings.precision, "device": device, "compiled": settings.compile}
    placement: Placement
    if layout is None:
        placement = OneDevice(model, **how)
    else:
        # These load what one device does not need.
        if config.parallel.pipeline > 1:
            from sheepop.train.pipelined import PipelinedModel as Placed
        else:
            from sheepop.train.sharded import ShardedModel as Placed  # type: ignore[assignment]
        placement = Placed(model, layout, optimizers, **how)
    evaluation = build_evaluation_weights(model, optimizers, config.training)
    objective = task.objective()
    with ranks.first_ahead():  # the others read what it stores, such as the log-probabilities of a reference
        source = task.source(objective, placement)
    pieces = None
    if layout is not None:
        from sheepop.train.sharded import ShardedModel

        assert isinstance(placement, ShardedModel)
        source, pieces = SharedSource(source, layout, placement.context), placement.pieces
    checkpointer = Checkpointer(
        run.directory,
        model,
        task.tokenizer(),
        optimizers,
        evaluation,
        {**run.record.provenance(), **task.provenance()},
        form,
        source,
        ranks,
        pieces,
    )
    return _Parts(model, adapters, optimizers, placement, evaluation, objective, source, checkpointer, is_given)


def _open_journal(
    run: OpenRun, adapters: int | None, state: TrainingState, measure: Callable[[], dict[str, Any]], stack: ExitStack
) -> Journal:
    """The logs of a run, cut to what they were at `state`; they close with the `stack`."""
    config, record, ranks = run.config, run.record, run.request.ranks
    nominal = record.nominal_peak_flops
    throughput = Throughput(
        lambda step: step_flops(config.model, step.row_length, step.num_computed, step.num_reported, adapters),
        ranks.size * record.matrix_peak_flops,
        None if nominal is None else ranks.size * nominal,
    )
    metrics: JsonLines = NoLines()
    samples: JsonLines = NoLines()
    if ranks.is_first:
        metrics = JsonLines(run.directory.metrics_file, state.metrics_bytes, is_verification)
        stack.callback(metrics.close)
        samples = JsonLines(run.directory.samples_file, state.samples_bytes)
        stack.callback(samples.close)
    path = run.directory.path.resolve()
    description = RunDescription(path, path.name, record.identity, state.step + 1, config.model_dump(mode="json"))
    sinks = config.training.sinks if ranks.is_first else ()
    return Journal(
        metrics,
        samples,
        throughput,
        device=run.device,
        precision=config.training.resolved().precision,
        sinks=[stack.enter_context(open_sinks(sinks, description, run.console))],
        console=run.console,
        is_sampled=config.training.eval_tokens is not None,
        measure=measure,
    )


def _observers(
    run: OpenRun, layout: Layout | None, steps_to_go: int, stack: ExitStack
) -> tuple[AroundStep, Callable[[], dict[str, Any]]]:
    """The observers of each step: the profiler, and with several ranks the watches for late and missing ones.

    The second value returns what they add to the rows of the metrics.
    """
    around_step: AroundStep = unobserved
    request, ranks = run.request, run.request.ranks
    if request.profile_steps is not None and ranks.is_first:
        around_step = StepProfiler(
            run.directory.profile,
            request.profile_steps,
            steps_to_go=steps_to_go,
            device=run.device,
            console=run.console,
        )
        stack.callback(around_step.close)
    if layout is None:
        return around_step, dict
    from sheepop.parallel.stragglers import Lateness, Watchdog

    # A host that waits for its GPU waits for other ranks with it.
    lateness = Lateness(ranks, layout.stage_size, run.console, waits=[Gradients.read.__code__])
    stack.enter_context(lateness.own_time.watching())
    patience, quiet = run.config.parallel.patience, Console(quiet=True)
    watchdog = Watchdog(ranks.rank, ranks.board("watchdog"), run.directory.stacks, patience, quiet)
    stack.enter_context(watchdog.watching())
    return _both(watchdog.step, _both(lateness.own_time.step, around_step)), lateness.measured


def _keep_layout(run: OpenRun, optimizers: Sequence[torch.optim.Optimizer], layout: Layout | None) -> None:
    """Writes the layout of the run into its record and plots, or removes an earlier one if there is none now."""
    if not run.request.ranks.is_first or (layout is None and run.record.layout is None):
        return
    picture, words = run.directory.plots / LAYOUT, None
    if layout is None:
        picture.unlink(missing_ok=True)
    else:
        from sheepop.jobs.run.plan import Planned

        planned = Planned.of(run.config, optimizers, layout, run.task.schedule.max_length, run.device)
        words = planned.words
        run.console.info(f"Layout: {words}")
        planned.draw(picture)
    run.keep(replace(run.record, layout=words))


def _both(outer: AroundStep, inner: AroundStep) -> AroundStep:
    """Runs a step within `inner`, within `outer`."""

    @contextmanager
    def around(number: int) -> Iterator[None]:
        with outer(number), inner(number):
            yield

    return around


@contextmanager
def _ending_together(run: OpenRun) -> Iterator[None]:
    """Lets all ranks end after a signal to one of them; the same signal may reach the others late and is ignored."""
    try:
        yield
    except Interrupted:
        if run.request.ranks.are_several and threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                signal.signal(number, partial(_swallow_once, before=signal.getsignal(number)))
        raise


def _swallow_once(number: int, frame: FrameType | None, *, before: Any) -> None:
    """Swallows one late copy of the signal, then restores the handler."""
    signal.signal(number, before)


@contextmanager
def _naming_the_last_checkpoint(run: RunDirectory) -> Iterator[None]:
    """Adds to an error within the block from which step the run can be resumed."""
    try:
        yield
    except (StorageError, RanksError) as error:
        step = run.pointer("latest")
        if step is None:
            raise type(error)(f"{error} No checkpoint of this run had been written.") from error
        raise type(error)(
            f"{error} Everything up to step {step:,} is saved; resume from there with: {resume_command(run.path)}"
        ) from error


def _restored(run: OpenRun, checkpointer: Checkpointer, fresh: TrainingState) -> TrainingState:
    """The state of the last good checkpoint, read back; `fresh` for a run that has none yet."""
    directory, console = run.directory, run.console
    step = directory.latest_good(console.warn)
    if step is None:
        if directory.steps():
            raise CheckpointError(f"No checkpoint in {directory.checkpoints} is intact, so the run cannot be resumed.")
        origin = run.record.forked_from
        if origin is not None:
            raise CheckpointError(
                f"The run in {directory.path} was stopped before it had saved the weights it started from. Start it "
                f"again with --fork {shlex.quote(origin['path'])} --overwrite."
            )
        console.warn(f"{directory.path} has no checkpoint, so the run starts from the beginning.")
        return fresh
    state = checkpointer.load(step)
    directory.mark_latest(step)
    state = checkpointer.with_best(state, console.warn)
    console.info(f"Resuming from step {step:,} of {directory.path}.")
    return state


def _announce(run: OpenRun, model: Transformer, state: TrainingState) -> None:
    """Says what is trained on how much data for how many steps."""
    training, schedule = run.config.training, run.task.schedule
    steps = training.resolved().total_steps
    epochs = schedule.sizes.total(steps) / schedule.num_samples
    run.console.info(
        f"Model: {sum(p.numel() for p in model.parameters()):,} parameters. "
        f"Data: {run.task.describe()}. "
        f"{steps - state.step:,} of {steps:,} steps to go ({epochs:.2f} epochs), {training.precision}."
    )
    if state.step >= steps:
        run.console.warn(
            f"All {steps:,} steps of this run have been taken. To train for longer, raise training.max_steps."
        )
