"""The loop of a run put together: network, optimizers, data, checkpoints, logs."""

from __future__ import annotations

import math
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ENDING_SIGNALS, CheckpointError, Interrupted, RanksError, StorageError
from sheepop.data import StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.layout_picture import SharedStep, forget_layout, keep_layout
from sheepop.jobs.run_kind import RunData, with_training
from sheepop.jobs.run_record import RunRecord, resume_command, write_run_config
from sheepop.jobs.training_evaluations import evaluation_interval
from sheepop.jobs.training_samples import TrainingTraces
from sheepop.model import Transformer, blank_model
from sheepop.model.accounting.operations import training_flops_per_token
from sheepop.parallel.layout import Layout
from sheepop.parallel.plan import Plan
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.parallel.sharding import Pieces
from sheepop.parallel.stage_memory import StepShape
from sheepop.parallel.stragglers import Lateness
from sheepop.parallel.watchdog import Watchdog
from sheepop.train import (
    Checkpointer,
    Schedule,
    Scores,
    Trainer,
    TrainingState,
    build_evaluation_weights,
    build_optimizers,
)
from sheepop.train.activation_checkpointing import StepBytes, apply_activation_checkpointing, step_bytes
from sheepop.train.agenda import SAMPLE, Agenda
from sheepop.train.config import TrainingConfig
from sheepop.train.journal import Journal, Throughput
from sheepop.train.metrics import JsonLines, NoLines
from sheepop.train.optimizers import optimizer_slots
from sheepop.train.pace import Deadline, Pace
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.precision import apply_precision, candidates, initial_loss_scale
from sheepop.train.profiler import AroundStep, StepProfiler, unobserved
from sheepop.train.sharded import ShardedModel
from sheepop.train.sinks import RunDescription, open_sinks
from sheepop.train.source import SharedSource
from sheepop.train.step import Gradients, StepRunner


@dataclass(frozen=True)
class ReadyRun:
    """A run about to train: its resolved settings, where it lives, what it reads, and what is recorded of it.

    It begins with the weights of `fork`, if that is given; one that `resumes` goes on from its last good checkpoint.
    """

    config: SheepOpConfig
    run: RunDirectory
    data: RunData
    record: RunRecord
    fork: Fork | None = None
    resumes: bool = False


def run_loop(
    ready: ReadyRun, device: str, console: Console, *, ranks: Ranks = ALONE, profile_steps: int | None = None
) -> SheepOpConfig:
    """Trains a run to its end, with the other `ranks`; raises `Interrupted`, with everything saved, after a signal.

    Returns the settings that the run has at its end: where the clock changed its steps, they are others than before.
    """
    config, run, data, record, fork = ready.config, ready.run, ready.data, ready.record, ready.fork
    tokenizer = data.tokenizer()
    model = build_network(data, config, device)
    # A run may have been killed before it had saved its first weights.
    has_begun = ready.resumes and bool(run.steps())
    if fork is not None:
        fork.forget()
    is_given = ranks.told(fork is not None or (ranks.is_first and not has_begun and data.begin(model, config, console)))
    optimizers = build_optimizers(model, config.training)
    form = data.form(model, config)
    settings = config.training.resolved()
    sample = data.samples(model, config, device)
    evaluate = data.evaluations(model, config, device, ranks)
    if config.trace.prompt is not None:
        sample = TrainingTraces(model, tokenizer, config.trace, run.traces, sample)
    placement, pieces = _placed(model, optimizers, config, ranks, device)
    evaluation = build_evaluation_weights(model, optimizers, config.training)
    objective = data.objective(config)
    with ranks.first_ahead():  # what is stored on the way, such as what a reference says, the others read
        plan = data.plan(config, run, console)
        source = data.source(config, plan, objective, placement)
    if isinstance(placement, ShardedModel):
        source = SharedSource(source, Layout(ranks, config.parallel), placement.context)
    checkpointer = Checkpointer(
        run,
        model,
        tokenizer,
        optimizers,
        evaluation,
        {**record.provenance(), **data.provenance()},
        form,
        source,
        ranks,
        pieces,
    )
    fresh = TrainingState(loss_scale=initial_loss_scale(settings.precision))
    state = _restore(run, checkpointer, record, console, fresh) if ready.resumes else fresh
    if state is fresh and sample is not None:
        state = state.after(due=(SAMPLE,))
    _announce(config, data, model, plan, state, console)
    if not isinstance(placement, ShardedModel):
        forget_layout(run, record)
    elif ranks.is_first:
        layout = Layout(ranks, config.parallel)
        words = str(costs(config, optimizers, layout, plan.max_length, device))
        console.info(f"Layout: {words}")
        keep_layout(run, record, words, SharedStep.of(config, layout, plan.max_length))
    budget, ended_with = record.deadline, config

    def write_pace(pace: Pace) -> None:
        nonlocal ended_with
        ended_with = with_training(config, config.training.at_pace(pace))
        if ranks.is_first:
            write_run_config(run, ended_with)

    lateness = None
    if ranks.are_several:
        group = Layout(ranks, config.parallel).stage_size
        # A host that waits for its GPU waits for other ranks with it.
        lateness = Lateness(ranks, group, console, waits=[Gradients.read.__code__])

    with ExitStack() as stack:
        metrics = JsonLines(run.metrics_file, state.metrics_bytes) if ranks.is_first else NoLines()
        stack.callback(metrics.close)
        samples = JsonLines(run.samples_file, state.samples_bytes) if ranks.is_first else NoLines()
        stack.callback(samples.close)
        sinks = config.training.sinks if ranks.is_first else ()
        journal = Journal(
            metrics,
            samples,
            Throughput(
                partial(training_flops_per_token, config.model),
                ranks.size * record.matrix_peak_flops,
                None if record.nominal_peak_flops is None else ranks.size * record.nominal_peak_flops,
            ),
            device=device,
            precision=settings.precision,
            sinks=[stack.enter_context(open_sinks(sinks, _description(run, record, config, state), console))],
            console=console,
            is_sampled=config.training.eval_tokens is not None,
            measure=dict if lateness is None else lateness.measured,
        )
        around_step: AroundStep = unobserved
        if profile_steps is not None and ranks.is_first:
            around_step = StepProfiler(
                run.profile,
                profile_steps,
                steps_to_go=settings.total_steps - state.step,
                device=device,
                console=console,
            )
            stack.callback(around_step.close)
        if lateness is not None:
            stack.enter_context(lateness.own_time.watching())
            around_step = _both(lateness.own_time.step, around_step)
            watchdog = Watchdog(
                ranks.rank, ranks.board("watchdog"), run.stacks, config.parallel.patience, Console(quiet=True)
            )
            stack.enter_context(watchdog.watching())
            around_step = _both(watchdog.step, around_step)
        validation: Callable[[], Scores] | None = None
        if (held_out := data.held_out(config)) is not None:
            validation = partial(
                data.score, model, held_out, config, device, max_tokens=config.training.eval_tokens, ranks=ranks
            )
        trainer = Trainer(
            runner=StepRunner(
                placement,
                objective,
                optimizers,
                evaluation,
                config.training.max_grad_norm,
            ),
            source=source,
            agenda=Agenda.of(
                config.training,
                settings,
                validates=validation is not None,
                evaluation_interval=evaluation_interval(config) if evaluate else None,
            ),
            schedule=Schedule(
                config.training.schedule,
                config.training.learning_rate,
                config.training.min_learning_rate,
                settings.warmup_steps,
                settings.pace.planned,
                settings.decay_steps,
                config.training.schedule_points or (),
            ),
            journal=journal,
            checkpointer=checkpointer,
            validate=validation,
            # Others wait for the first rank at the next step.
            sample=sample if sample and ranks.is_first else (lambda step: []),
            evaluate=evaluate,
            seed=config.seed,
            keep_checkpoints=config.training.keep_checkpoints,
            trouble=config.training.trouble,
            state=state,
            deadline=None if budget is None else Deadline(budget.seconds, budget.most_steps, write_pace),
            around_step=around_step,
            console=console,
            saves_the_beginning=is_given,
        )
        with _saying_what_is_saved(run), _ending_together(ranks):
            trainer.run()
    return ended_with


@contextmanager
def _ending_together(ranks: Ranks) -> Iterator[None]:
    """After a signal to one rank all end; the same signal to the others, which may come late, changes nothing then."""
    try:
        yield
    except Interrupted:
        if ranks.are_several and threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                signal.signal(number, partial(_pass_over, before=signal.getsignal(number)))
        raise


def _pass_over(number: int, frame: FrameType | None, *, before: Any) -> None:
    """Takes a signal for the late one; another is heard as before."""
    signal.signal(number, before)


@contextmanager
def _saying_what_is_saved(run: RunDirectory) -> Iterator[None]:
    """A refused write within the block says at its end from where the run can go on."""
    try:
        yield
    except (StorageError, RanksError) as error:
        step = run.pointer("latest")
        if step is None:
            raise type(error)(f"{error} No checkpoint of this run had been written.") from error
        raise type(error)(
            f"{error} Everything up to step {step:,} is saved; resume from there with: {resume_command(run.path)}"
        ) from error


def _placed(
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    config: SheepOpConfig,
    ranks: Ranks,
    device: str,
) -> tuple[Placement, Pieces | None]:
    """The model where its steps are computed, and the pieces that this rank has of its parameters."""
    settings = config.training.resolved()
    precision, compiled = settings.precision, settings.compile
    if not ranks.are_several:
        return OneDevice(model, precision=precision, device=device, compiled=compiled), None
    kind = PipelinedModel if config.parallel.pipeline > 1 else ShardedModel
    placement = kind(model, Layout(ranks, config.parallel), precision=precision, device=device, compiled=compiled)
    placement.take_over(optimizers)
    return placement, placement.pieces


def _both(outer: AroundStep, inner: AroundStep) -> AroundStep:
    @contextmanager
    def around(number: int) -> Iterator[None]:
        with outer(number), inner(number):
            yield

    return around


def costs(
    config: SheepOpConfig,
    optimizers: Sequence[torch.optim.Optimizer],
    layout: Layout,
    num_tokens: int,
    device: str,
) -> Plan:
    """What a run with these settings costs the rank that needs most memory, for rows of `num_tokens`."""
    settings = config.training.resolved()
    rows = settings.micro_batch_size
    step = StepShape(
        rows=rows,
        num_tokens=num_tokens,
        micro_batches=max(1, config.training.global_batch_size // rows // layout.num_data),
        precision=settings.precision,
        device=device,
        recomputed=settings.activation_checkpointing,
        recomputed_blocks=config.training.checkpointed_blocks,
    )
    # Of the shapes that parameters have here, which are those of pieces.
    numbers, kept = 0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer_slots(optimizer, group, parameter).values()
                numbers += parameter.numel()
                kept += sum(math.prod(shape) for shape in slots if shape is not None)
    averages = 0 if config.training.ema_decay is None else 1
    with torch.device("meta"):
        whole = blank_model(config.model)
    return Plan.largest(whole, layout, step, state=kept / max(1, numbers) + averages)


def build_network(data: RunData, config: SheepOpConfig, device: str) -> Transformer:
    """The network that a run begins with, and what precision and activation checkpointing change in it."""
    model, training = data.network(config, device), config.training
    apply_precision(model, training.precision)
    if training.activation_checkpointing != "auto":
        apply_activation_checkpointing(model, training.activation_checkpointing, training.checkpointed_blocks)
    return model


def bytes_of_a_step(config: SheepOpConfig, training: TrainingConfig, length: int, device: str) -> StepBytes:
    """What a step needs, in the precision of those in question that needs most."""
    rows = training.micro_batch_size or training.global_batch_size
    found = [
        step_bytes(config.model, training, precision, rows, length, device)
        for precision in candidates(training.precision, device)
    ]
    return max(found, key=lambda needed: needed.peak("none", 0))


def _description(run: RunDirectory, record: RunRecord, config: SheepOpConfig, state: TrainingState) -> RunDescription:
    path = run.path.resolve()
    return RunDescription(path, path.name, record.identity, state.step + 1, config.model_dump(mode="json"))


def _restore(
    run: RunDirectory, checkpointer: Checkpointer, record: RunRecord, console: Console, fresh: TrainingState
) -> TrainingState:
    """The state of the last good checkpoint, read back; `fresh` for a run that has none yet."""
    step = run.latest_good(console.warn)
    if step is None:
        if run.steps():
            raise CheckpointError(f"No checkpoint in {run.checkpoints} is intact, so the run cannot be resumed.")
        if record.forked_from is not None:
            raise CheckpointError(
                f"The run in {run.path} was stopped before it had saved the weights it started from. Start it again "
                f"with --fork {shlex.quote(record.forked_from['path'])} --overwrite."
            )
        console.warn(f"{run.path} has no checkpoint, so the run starts from the beginning.")
        return fresh
    state = checkpointer.load(step)
    run.mark_latest(step)
    state = checkpointer.with_best(state, console.warn)
    console.info(f"Resuming from step {step:,} of {run.path}.")
    return state


def _announce(
    config: SheepOpConfig,
    data: RunData,
    model: Transformer,
    plan: StepPlan,
    state: TrainingState,
    console: Console,
) -> None:
    steps = config.training.resolved().total_steps
    epochs = plan.sizes.total(steps) / plan.num_samples
    console.info(
        f"Model: {sum(p.numel() for p in model.parameters()):,} parameters. "
        f"Data: {data.describe()}. "
        f"{steps - state.step:,} of {steps:,} steps to go ({epochs:.2f} epochs), {config.training.precision}."
    )
    if state.step >= steps:
        console.warn(f"All {steps:,} steps of this run have been taken. To train for longer, raise training.max_steps.")
