"""Trains a model: corpus, plan, loop, scores, pictures. A run directory holds everything it leaves."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.config import dump_config
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import CheckpointError, ConfigError, Interrupted, SheepOpError
from sheepop.core.files import write_atomic
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.data import Batches, Corpus, StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.resume import RunRecord, corpus_settings, find_resumable, refuse_changes
from sheepop.jobs.run_report import write_run_report
from sheepop.jobs.stage_times import StageTimes
from sheepop.jobs.training_data import (
    build_batches,
    build_plan,
    documents_of_step,
    open_corpus,
    refuse_ignored_settings,
)
from sheepop.jobs.training_samples import TrainingSamples
from sheepop.model import Transformer, build_model
from sheepop.model.cost import training_flops_per_token
from sheepop.model.speed import matrix_peak
from sheepop.train import (
    Checkpointer,
    Schedule,
    Scores,
    Trainer,
    TrainingState,
    build_evaluation_weights,
    build_optimizers,
    check_layers,
    validate,
)
from sheepop.train.activation_checkpointing import (
    ActivationBytes,
    apply_activation_checkpointing,
    measure_activations,
    resolve_activation_checkpointing,
)
from sheepop.train.config import TrainingConfig
from sheepop.train.interrupt import interrupts_advise
from sheepop.train.metrics import JsonLines
from sheepop.train.objective import NextToken, TensorBatch
from sheepop.train.plan import measure_step, measuring_seconds, needs_measuring, resolve_training
from sheepop.train.precision import apply_precision, candidates, choose_matrix_arithmetic, torch_dtype
from sheepop.train.profiler import DIRECTORY as PROFILE
from sheepop.train.profiler import AroundStep, StepProfiler, unobserved
from sheepop.train.sinks import RunDescription, open_sinks


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run left."""

    run: Path
    steps: int
    tokens: int
    best_step: int
    ended_early: bool  # because the held-out loss no longer fell
    scores: Scores | None  # of the best checkpoint on the whole held-out split, if one is held out


def train(
    config: SheepOpConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fork: Path | None = None,
    console: Console | None = None,
    profile_steps: int | None = None,
) -> TrainOutcome:
    """Runs `config` from its data to its report and returns the best checkpoint's scores (see `run_training`)."""
    times = StageTimes()
    path = config.output_dir or str(default_run_path())
    config = config.model_copy(update={"output_dir": path})
    with interrupts_advise(f"Go on with: sheepop train --resume {shlex.quote(path)}"):
        outcome = run_training(
            config,
            resume=resume,
            overwrite=overwrite,
            fork=fork,
            console=console,
            times=times,
            profile_steps=profile_steps,
        )
        record = RunRecord.read(outcome.run)
        write_run_report(RunDirectory.open(outcome.run), outcome.scores, record, seconds=times.seconds)
    return outcome


def run_training(
    config: SheepOpConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fork: Path | None = None,
    console: Console | None = None,
    times: StageTimes | None = None,
    profile_steps: int | None = None,
) -> TrainOutcome:
    """Runs `config` from its data to the scores of its best checkpoint; the stages' times are added to `times`.

    With `profile_steps` that many steps are profiled into the run's ``profile/``.

    With `resume` a run that `config.output_dir` already holds goes on exactly where its last good checkpoint
    stands; without a run there it starts, with the weights of the model that `fork` means if given. Raises
    `Interrupted` after a signal, with everything saved, and `CheckpointError` while another process works on the run.
    """
    console = console or Console.silent()
    path = Path(config.output_dir) if config.output_dir else default_run_path()
    with RunDirectory(path).locked() as is_locked:
        if not is_locked:
            console.warn(
                f"The file system of {path} knows no locks: make sure that no other process works on this run."
            )
        return _locked_run(config, path, resume, overwrite, fork, console, times or StageTimes(), profile_steps)


def _locked_run(
    config: SheepOpConfig,
    path: Path,
    resume: bool,
    overwrite: bool,
    fork: Path | None,
    console: Console,
    times: StageTimes,
    profile_steps: int | None,
) -> TrainOutcome:
    require_sinks(config.training.sinks)
    device = resolve_device(config.device)
    stored = find_resumable(path) if resume else None
    choose_matrix_arithmetic(device)
    _make_deterministic(config.deterministic)  # before a step is measured: such algorithms may be slower
    origin = None
    if stored is None:
        with (
            interrupts_advise(f"No step was taken and nothing of it is left in {path}."),
            RunDirectory.starting(path, overwrite=overwrite or resume) as run,
        ):
            asked = config
            if fork is not None:
                origin = Fork.read(fork)
                config = origin.inherit(config)
            with times("Corpus and vocabulary"):
                corpus = open_corpus(config, run, console)
                refuse_ignored_settings(asked, corpus)
                if origin is not None:
                    origin.require(corpus)
            with times("Measuring"):
                config, record = _start(config, asked, run, corpus, device, console, origin)
    else:
        run = RunDirectory.open(path)
        corpus = open_corpus(corpus_settings(stored, config), run, console)
        record = stored.record.going_on(asked=config, step=stored.step, device=device)
        config = refuse_changes(stored, config, corpus, path)
        write_atomic(run.config_file, dump_config(config))
        record.write(run)
    with times("Training"):
        resume = stored is not None
        _run(config, run, corpus, record, device, console, resume=resume, fork=origin, profile_steps=profile_steps)
    with times("Scoring"):
        return score_run(run, corpus, config, device, console)


def default_run_path() -> Path:
    """``runs/`` and the date and time, to the second."""
    return Path("runs") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")


def score_run(run: RunDirectory, corpus: Corpus, config: SheepOpConfig, device: str, console: Console) -> TrainOutcome:
    """The best checkpoint's scores on the whole held-out split."""
    loaded = load_model(run.path, device)
    steps, provenance = run.steps(), loaded.provenance
    early = steps[-1] < config.training.resolved().total_steps
    outcome = TrainOutcome(run.path, steps[-1], int(provenance["tokens"]), int(provenance["step"]), early, None)
    if corpus.validation.num_tokens == 0:
        return outcome
    batches = build_batches(config, corpus.validation, corpus.tokenizer(), evaluation=True)
    with console.progress("Scoring", batches.num_samples, "samples") as progress:
        scores = validate(
            loaded.model,
            batches,
            loaded.tokenizer.byte_lengths(),
            batch_size=_evaluation_batch(config),
            precision=config.training.precision,
            device=device,
            on_batch=progress.advance,
        )
    return replace(outcome, scores=scores)


def _start(
    config: SheepOpConfig,
    asked: SheepOpConfig,
    run: RunDirectory,
    corpus: Corpus,
    device: str,
    console: Console,
    fork: Fork | None,
) -> tuple[SheepOpConfig, RunRecord]:
    """Resolves what is derived or measured, and writes it down before the first step."""
    config = fit_model_to_tokenizer(config, corpus)
    batches = build_batches(config, corpus.train, corpus.tokenizer())
    training = config.training
    with torch.device("meta"):
        check_layers(dict(Transformer(config.model).named_parameters()), training.layers)
    if training.early_stopping is not None and corpus.validation.num_tokens == 0:
        raise ConfigError(
            "training.early_stopping watches the loss of held-out text, and none is held out. "
            "Raise data.validation_fraction, or leave early_stopping out."
        )
    if training.compile and device == "cpu" and not _has_compiler():
        console.warn(
            "training.compile needs a C++ compiler and Python's headers, and they were not found; "
            "the run goes on without it."
        )
        training = training.replace(compile=False)
    training = resolve_activation_checkpointing(
        training, lambda: _measure_activations(config, training, batches, device), device
    )
    timing = None
    if needs_measuring(training, device):
        timing = measure_step(
            lambda: _build_network(config, training, device),
            batches,
            training,
            device,
            seconds=measuring_seconds(training),
            console=console,
        )
    validation_tokens = corpus.validation.num_tokens
    training = resolve_training(
        training,
        timing,
        device=device,
        num_samples=build_plan(config, corpus, run, console).num_samples,
        seq_len=batches.max_length,
        validation_tokens=min(validation_tokens, training.eval_tokens or validation_tokens),
    )
    settings = training.resolved()
    if config.training.warmup_steps is not None and settings.warmup_steps >= settings.total_steps:
        console.warn(
            f"training.warmup_steps = {settings.warmup_steps} is not over when the run ends after "
            f"{settings.total_steps} steps, so the learning rate never reaches {training.learning_rate}."
        )
    record = RunRecord.create(
        corpus,
        asked=asked,
        step_seconds=timing.seconds if timing else None,
        matrix_peak_flops=matrix_peak(torch_dtype(training.precision), device),
        fork=fork,
        device=device,
    )
    config = config.replace(training=training.model_dump())
    record.write(run)
    write_atomic(run.config_file, dump_config(config))
    return config, record


def _build_network(config: SheepOpConfig, training: TrainingConfig, device: str) -> Transformer:
    """The network with what precision and activation checkpointing change in it."""
    model = build_model(config.model, config.seed, device)
    apply_precision(model, training.precision)
    if training.activation_checkpointing != "auto":
        apply_activation_checkpointing(model, training.activation_checkpointing, training.checkpointed_blocks)
    return model


def _measure_activations(
    config: SheepOpConfig, training: TrainingConfig, batches: Batches, device: str
) -> ActivationBytes:
    """What a micro-batch keeps, in the precision of those in question that keeps most."""
    model = _build_network(config, training, device).train()
    row = replace(TensorBatch.from_numpy(batches.batch(np.arange(1)), device), positions=None, document_ids=None)
    rows = training.micro_batch_size or training.global_batch_size
    found = [
        measure_activations(model, NextToken(), row, rows, device=device, precision=precision)
        for precision in candidates(training.precision, device)
    ]
    return max(found, key=lambda activations: activations.peak("none", 0))


def _run(
    config: SheepOpConfig,
    run: RunDirectory,
    corpus: Corpus,
    record: RunRecord,
    device: str,
    console: Console,
    *,
    resume: bool,
    fork: Fork | None,
    profile_steps: int | None,
) -> None:
    tokenizer = corpus.tokenizer()
    model = _build_network(config, config.training, device)
    if fork is not None:
        model.load_state_dict(fork.loaded.model.state_dict())
    optimizers = build_optimizers(model, config.training)
    evaluation = build_evaluation_weights(model, optimizers, config.training)
    checkpointer = Checkpointer(run, model, tokenizer, optimizers, evaluation, record.provenance())
    state = _restore(run, checkpointer, record, console) if resume else TrainingState()
    settings = config.training.resolved()
    plan = build_plan(config, corpus, run, console)
    _announce(config, corpus, model, plan, state, console)
    with ExitStack() as stack:
        metrics = JsonLines(run.metrics_file, state.metrics_bytes)
        stack.callback(metrics.close)
        samples = JsonLines(run.samples_file, state.samples_bytes)
        stack.callback(samples.close)
        sinks = stack.enter_context(
            open_sinks(config.training.sinks, _description(run, record, config, state), console)
        )
        around_step: AroundStep = unobserved
        if profile_steps is not None:
            around_step = StepProfiler(
                run.path / PROFILE,
                profile_steps,
                steps_to_go=settings.total_steps - state.step,
                device=device,
                console=console,
            )
            stack.callback(around_step.close)
        trainer = Trainer(
            model=model,
            # Only training steps are compiled: they have one shape, and texts of every length are sampled too.
            forward=torch.compile(model) if config.training.compile else model,
            optimizers=optimizers,
            evaluation=evaluation,
            plan=plan,
            config=config.training,
            resolved=settings,
            schedule=Schedule(
                config.training.schedule,
                config.training.learning_rate,
                config.training.min_learning_rate,
                settings.warmup_steps,
                settings.total_steps,
                settings.decay_steps,
                config.training.schedule_points or (),
            ),
            checkpointer=checkpointer,
            metrics=metrics,
            samples=samples,
            validate=_validation(config, corpus, model, device),
            sample=TrainingSamples(model, tokenizer, config, device),
            device=device,
            seed=config.seed,
            flops_per_token=training_flops_per_token(config.model, plan.max_length),
            peak_flops=record.matrix_peak_flops,
            state=state,
            sinks=[sinks],
            around_step=around_step,
            console=console,
            describe=lambda number: documents_of_step(corpus, plan, number),
            saves_the_beginning=fork is not None,
        )
        try:
            trainer.run()
        except Interrupted:
            # Everything is saved by now; a report that fails must not hide that.
            try:
                write_run_report(run, None, record)
            except SheepOpError as error:
                console.warn(f"The report was not written: {error}")
            raise


def _description(run: RunDirectory, record: RunRecord, config: SheepOpConfig, state: TrainingState) -> RunDescription:
    path = run.path.resolve()
    return RunDescription(path, path.name, record.identity, state.step + 1, config.model_dump(mode="json"))


def _validation(config: SheepOpConfig, corpus: Corpus, model: Transformer, device: str) -> Callable[[], Scores] | None:
    """The loop's view of the held-out split; None when nothing is held out."""
    if corpus.validation.num_tokens == 0:
        return None
    tokenizer = corpus.tokenizer()
    batches = build_batches(config, corpus.validation, tokenizer, evaluation=True)
    return lambda: validate(
        model,
        batches,
        tokenizer.byte_lengths(),
        batch_size=_evaluation_batch(config),
        precision=config.training.precision,
        device=device,
        max_tokens=config.training.eval_tokens,
    )


def _restore(run: RunDirectory, checkpointer: Checkpointer, record: RunRecord, console: Console) -> TrainingState:
    step = run.latest_good(console.warn)
    if step is None:
        if run.steps():
            raise CheckpointError(f"No checkpoint in {run.checkpoints} is whole, so the run cannot go on.")
        if record.forked_from is not None:
            raise CheckpointError(
                f"The run in {run.path} was stopped before it had saved the weights it began with. Start it again with "
                f"--fork {shlex.quote(record.forked_from['path'])} --overwrite."
            )
        return TrainingState()
    state = checkpointer.load(step)
    state = checkpointer.with_best(state, console.warn)
    console.info(f"Going on from step {step:,} of {run.path}.")
    return state


def fit_model_to_tokenizer(config: SheepOpConfig, corpus: Corpus) -> SheepOpConfig:
    """`config` with the vocabulary of the corpus; raises `ConfigError` for a smaller one."""
    vocab_size = corpus.tokenizer().vocab_size
    if config.model.vocab_size is None:
        return config.replace(model={**config.model.model_dump(), "vocab_size": vocab_size})
    if config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {vocab_size} tokens. "
            "Leave it out to take the tokenizer's size."
        )
    return config


def _announce(
    config: SheepOpConfig,
    corpus: Corpus,
    model: Transformer,
    plan: StepPlan,
    state: TrainingState,
    console: Console,
) -> None:
    steps = config.training.resolved().total_steps
    epochs = plan.sizes.total(steps) / plan.num_samples
    console.info(
        f"Model: {sum(p.numel() for p in model.parameters()):,} parameters. "
        f"Data: {corpus.train.num_tokens:,} training tokens, {corpus.validation.num_tokens:,} held out. "
        f"{steps - state.step:,} of {steps:,} steps to go ({epochs:.2f} epochs), {config.training.precision}."
    )


def _evaluation_batch(config: SheepOpConfig) -> int:
    return config.training.micro_batch_size or config.training.global_batch_size


def _make_deterministic(wanted: bool) -> None:
    torch.use_deterministic_algorithms(wanted)
    # Filling memory that is about to be written costs time; no kernel used here reads it before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not wanted


def _has_compiler() -> bool:
    return find_compiler() is not None and has_python_headers()
