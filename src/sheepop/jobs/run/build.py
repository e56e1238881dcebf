"""Builds the trainer of an open run: network, optimizers, data, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sheepop.jobs.run.analysis import build_analysis
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.run.record import LAYOUT, resume_command
from sheepop.jobs.run.resolve import build_network
from sheepop.model import Transformer
from sheepop.model.accounting.cost import step_flops
from sheepop.parallel.layout import Layout
from sheepop.train import (
    Checkpointer,
    EvaluationWeights,
    Schedule,
    Scores,
    Trainer,
    TrainingConfig,
    TrainingState,
    build_evaluation_weights,
    build_optimizers,
)
from sheepop.train.agenda import EVALUATE, SAMPLE, VALIDATE, Agenda
from sheepop.train.journal import Journal, Throughput
from sheepop.train.objective import Objective
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.precision import initial_loss_scale
from sheepop.train.profiler import AroundStep, StepProfiler, unobserved, watched
from sheepop.train.schedule import Deadline
from sheepop.train.sinks import RunDescription
from sheepop.train.source import SharedSource, StepSource
from sheepop.train.step import StepRunner


@dataclass(frozen=True)
class Parts:
    """The parts of a trainer. `saves_the_beginning` is true if the seed alone does not give the initial weights."""

    model: Transformer
    optimizers: Sequence[torch.optim.Optimizer]
    placement: Placement
    evaluation: EvaluationWeights
    objective: Objective
    source: StepSource
    checkpointer: Checkpointer
    throughput: Throughput
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
    parts = build_parts(run, layout)
    sample = run.task.samples(parts.model, run.device)
    evaluate = run.task.evaluations(parts.model, run.device, ranks)
    held_out = run.task.held_out()
    validate: Callable[[], Scores] | None = None
    if held_out is not None:
        validate = partial(
            run.task.score, parts.model, held_out, run.device, max_tokens=training.eval_tokens, ranks=ranks
        )
    state = parts.checkpointer.resumed(console) if run.resumes else None
    if state is None:
        # A finished model is scored before it changes, so that the change can be seen.
        first = {VALIDATE: begins_finished and validate, EVALUATE: begins_finished and evaluate, SAMPLE: sample}
        due = tuple(name for name, work in first.items() if work)
        state = TrainingState(loss_scale=initial_loss_scale(settings.precision)).after(due=due)
    with (
        parts.checkpointer.naming_the_last(resume_command(run.directory.path)),
        _logged(run, parts, state, layout) as (around_step, journal),
        ranks.ending_together(),
    ):
        yield Trainer(
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
            schedule=schedule_of(training),
            journal=journal,
            checkpointer=parts.checkpointer,
            validate=validate,
            # Others wait for the first rank at the next step.
            sample=sample if sample and ranks.is_first else (lambda step: []),
            evaluate=evaluate,
            seed=config.seed,
            keep_checkpoints=training.keep_checkpoints,
            trouble=training.trouble,
            state=state,
            deadline=None
            if budget is None
            else Deadline(
                budget.seconds, budget.most_steps, run.write_pace, budget.after_seconds, budget.score_seconds or 0.0
            ),
            around_step=around_step,
            observe=build_analysis(config, parts.placement, parts.optimizers, console),
            console=console,
            saves_the_beginning=parts.saves_the_beginning,
        )


def schedule_of(training: TrainingConfig) -> Schedule:
    """The learning rate of every step of a run with these resolved settings."""
    settings = training.resolved()
    return Schedule(
        training.schedule,
        training.learning_rate,
        training.min_learning_rate,
        settings.warmup_steps,
        settings.pace.planned,
        settings.decay_steps,
        training.schedule_points or (),
    )


def build_parts(run: OpenRun, layout: Layout | None) -> Parts:
    """The network with all that trains and saves it, over the ranks of the `layout`."""
    task, config, ranks, device = run.task, run.config, run.request.ranks, run.device
    model = build_network(task, device)
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
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapters = None if config.tuning.lora is None else trained
    nominal = run.record.nominal_peak_flops
    throughput = Throughput(
        lambda step: step_flops(config.model, step.row_length, step.num_computed, step.num_reported, adapters),
        ranks.size * run.record.matrix_peak_flops,
        None if nominal is None else ranks.size * nominal,
    )
    return Parts(model, optimizers, placement, evaluation, objective, source, checkpointer, throughput, is_given)


@contextmanager
def _logged(
    run: OpenRun, parts: Parts, state: TrainingState, layout: Layout | None
) -> Iterator[tuple[AroundStep, Journal]]:
    """Says what is trained; yields what observes each step, and the logs of the run as they were at `state`."""
    _announce(run, parts, state, layout)
    config, record, request, ranks = run.config, run.record, run.request, run.request.ranks
    settings, path = config.training.resolved(), run.directory.path.resolve()
    around_step: AroundStep = unobserved
    measure: Callable[[], dict[str, Any]] = dict
    with ExitStack() as stack:
        if request.profile_steps is not None and ranks.is_first:
            around_step = stack.enter_context(
                closing(
                    StepProfiler(
                        run.directory.profile,
                        request.profile_steps,
                        steps_to_go=settings.total_steps - state.step,
                        device=run.device,
                        console=run.console,
                    )
                )
            )
        if layout is not None:
            watches = watched(
                around_step, ranks, layout.stage_size, run.directory.stacks, config.parallel.patience, run.console
            )
            around_step, measure = stack.enter_context(watches)
        journal = Journal.opened(
            run.directory,
            state,
            config.training.sinks,
            RunDescription(path, path.name, record.identity, state.step + 1, config.model_dump(mode="json")),
            run.console,
            writes=ranks.is_first,
            throughput=parts.throughput,
            device=run.device,
            precision=settings.precision,
            is_sampled=config.training.eval_tokens is not None,
            measure=measure,
        )
        yield around_step, stack.enter_context(journal)


def _announce(run: OpenRun, parts: Parts, state: TrainingState, layout: Layout | None) -> None:
    """Says what is trained on how much data for how many steps, and keeps the layout in the record and plots."""
    training, schedule, record = run.config.training, run.task.schedule, run.record
    steps = training.resolved().total_steps
    epochs = schedule.sizes.total(steps) / schedule.num_samples
    run.console.info(
        f"Model: {sum(p.numel() for p in parts.model.parameters()):,} parameters. "
        f"Data: {run.task.describe()}. "
        f"{steps - state.step:,} of {steps:,} steps to go ({epochs:.2f} epochs), {training.precision}."
    )
    if state.step >= steps:
        run.console.warn(
            f"All {steps:,} steps of this run have been taken. To train for longer, raise training.max_steps."
        )
    if state.step == 0 and VALIDATE in state.due:
        run.console.info("The model is scored as it is, before its first step.")
    picture = run.directory.plots / LAYOUT
    if not run.request.ranks.is_first:
        return
    if layout is not None:
        from sheepop.jobs.run.plan import Planned

        planned = Planned.of(run.config, parts.optimizers, layout, schedule.max_length, run.device)
        run.console.info(f"Layout: {planned.words}")
        planned.draw(picture)
        run.record = replace(record, layout=planned.words)
    else:
        picture.unlink(missing_ok=True)  # of an earlier start
        run.record = replace(record, layout=None)
