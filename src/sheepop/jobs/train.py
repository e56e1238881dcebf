"""Trains a model: corpus, plan, loop, scores, pictures. A run directory holds everything it leaves."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.config import dump_config
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import CheckpointError, ConfigError, Interrupted, SheepOpError
from sheepop.core.files import write_atomic
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.data import Batches, Corpus, SampleOrder
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.resume import RunRecord, corpus_settings, find_resumable, refuse_changes
from sheepop.jobs.run_report import write_run_report
from sheepop.jobs.stage_times import StageTimes
from sheepop.jobs.training_data import build_batches, open_corpus, refuse_ignored_settings
from sheepop.jobs.training_samples import TrainingSamples
from sheepop.model import Transformer, build_model
from sheepop.model.cost import training_flops_per_token
from sheepop.model.speed import matrix_peak
from sheepop.train import Checkpointer, Schedule, Scores, Trainer, TrainingState, build_optimizers, validate
from sheepop.train.interrupt import interrupts_advise
from sheepop.train.metrics import JsonLines, tensorboard
from sheepop.train.network import Network
from sheepop.train.objective import NextToken
from sheepop.train.plan import measure_step, measuring_seconds, needs_measuring, resolve_training
from sheepop.train.precision import torch_dtype


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run left."""

    run: Path
    steps: int
    tokens: int
    best_step: int
    scores: Scores | None  # of the best checkpoint on the whole held-out split, if one is held out


def train(
    config: SheepOpConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> TrainOutcome:
    """Runs `config` from its data to its report and returns the best checkpoint's scores (see `run_training`)."""
    times = StageTimes()
    path = config.output_dir or str(default_run_path())
    config = config.model_copy(update={"output_dir": path})
    with interrupts_advise(f"Go on with: sheepop train --resume {shlex.quote(path)}"):
        outcome = run_training(config, resume=resume, overwrite=overwrite, console=console, times=times)
        record = RunRecord.read(outcome.run)
        write_run_report(RunDirectory.open(outcome.run), outcome.scores, record, seconds=times.seconds)
    return outcome


def run_training(
    config: SheepOpConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    times: StageTimes | None = None,
) -> TrainOutcome:
    """Runs `config` from its data to the scores of its best checkpoint; the stages' times are added to `times`.

    With `resume` a run that `config.output_dir` already holds goes on exactly where its last good checkpoint
    stands; without a run there it starts. Raises `Interrupted` after a signal, with everything saved.
    """
    console = console or Console.silent()
    times = times or StageTimes()
    device = resolve_device(config.device)
    path = Path(config.output_dir) if config.output_dir else default_run_path()
    stored = find_resumable(path) if resume else None
    _make_deterministic(config.deterministic)  # before a step is measured: such algorithms may be slower
    if stored is None:
        with (
            interrupts_advise(f"No step was taken and nothing of it is left in {path}."),
            RunDirectory.starting(path, overwrite=overwrite or resume) as run,
        ):
            with times("Corpus and vocabulary"):
                corpus = open_corpus(config, run, console)
                refuse_ignored_settings(config, corpus)
            with times("Measuring"):
                config, record = _start(config, run, corpus, device, console)
    else:
        run = RunDirectory.open(path)
        corpus = open_corpus(corpus_settings(stored, config), run, console)
        record = replace(stored.record, asked=config.model_dump(mode="json"))
        config = refuse_changes(stored, config, corpus)
        write_atomic(run.config_file, dump_config(config))
        record.write(run)
    with times("Training"):
        _run(config, run, corpus, record, device, console, resume=stored is not None)
    with times("Scoring"):
        return score_run(run, corpus, config, device, console)


def default_run_path() -> Path:
    """``runs/`` and the date and time, to the second."""
    return Path("runs") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")


def score_run(run: RunDirectory, corpus: Corpus, config: SheepOpConfig, device: str, console: Console) -> TrainOutcome:
    """The best checkpoint's scores on the whole held-out split."""
    loaded = load_model(run.path, device)
    steps, provenance = run.steps(), loaded.provenance
    outcome = TrainOutcome(run.path, steps[-1], int(provenance["tokens"]), int(provenance["step"]), None)
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
    config: SheepOpConfig, run: RunDirectory, corpus: Corpus, device: str, console: Console
) -> tuple[SheepOpConfig, RunRecord]:
    """Resolves what is derived or measured, and writes it down before the first step."""
    asked, config = config, _fit_model_to_tokenizer(config, corpus)
    batches = build_batches(config, corpus.train, corpus.tokenizer())
    training = config.training
    if training.compile and device == "cpu" and not _has_compiler():
        if training.compile is True:
            console.warn(
                "training.compile needs a C++ compiler and Python's headers, and they were not found; "
                "the run goes on without it."
            )
        training = training.replace(compile=False)
    timing = None
    if needs_measuring(training, device):
        timing = measure_step(
            lambda: build_model(config.model, config.seed, device),
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
        num_samples=batches.num_samples,
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
    )
    config = config.replace(training=training.model_dump())
    record.write(run)
    write_atomic(run.config_file, dump_config(config))
    return config, record


def _run(
    config: SheepOpConfig,
    run: RunDirectory,
    corpus: Corpus,
    record: RunRecord,
    device: str,
    console: Console,
    *,
    resume: bool,
) -> None:
    tokenizer = corpus.tokenizer()
    model = build_model(config.model, config.seed, device)
    optimizers = build_optimizers(model, config.training)
    checkpointer = Checkpointer(run, model, tokenizer, optimizers, record.provenance())
    state = _restore(run, checkpointer, console) if resume else TrainingState()
    settings = config.training.resolved()
    train_batches = build_batches(config, corpus.train, tokenizer)
    _announce(config, corpus, model, train_batches, state, console)
    with ExitStack() as stack:
        metrics = JsonLines(run.metrics_file, state.metrics_bytes)
        stack.callback(metrics.close)
        samples = JsonLines(run.samples_file, state.samples_bytes)
        stack.callback(samples.close)
        trainer = Trainer(
            model=model,
            network=Network(model, precision=settings.precision, device=device, compiled=settings.compile),
            optimizers=optimizers,
            batches=train_batches,
            order=SampleOrder(train_batches.num_samples, config.seed),
            config=config.training,
            resolved=settings,
            schedule=Schedule(
                config.training.schedule,
                config.training.learning_rate,
                config.training.min_learning_rate,
                settings.warmup_steps,
                settings.total_steps,
            ),
            checkpointer=checkpointer,
            metrics=metrics,
            samples=samples,
            validate=_validation(config, corpus, model, device),
            sample=TrainingSamples(model, tokenizer, config, device),
            device=device,
            seed=config.seed,
            flops_per_token=training_flops_per_token(config.model, train_batches.max_length),
            peak_flops=record.matrix_peak_flops,
            state=state,
            objective=NextToken.configured(config.training),
            sinks=[stack.enter_context(tensorboard(run.path / "tensorboard", state.step + 1))],
            console=console,
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


def _restore(run: RunDirectory, checkpointer: Checkpointer, console: Console) -> TrainingState:
    step = run.latest_good(console.warn)
    if step is None:
        if run.steps():
            raise CheckpointError(f"No checkpoint in {run.checkpoints} is whole, so the run cannot go on.")
        return TrainingState()
    state = checkpointer.load(step)
    if state.best_step is not None and run.pointer("best") != state.best_step:
        if state.best_step in run.steps():
            run.mark_best(state.best_step)
        else:
            console.warn(f"The best checkpoint, step {state.best_step}, is gone; the next validation names a new one.")
            state = state.after(best_loss=None, best_step=None)
    console.info(f"Going on from step {step:,} of {run.path}.")
    return state


def _fit_model_to_tokenizer(config: SheepOpConfig, corpus: Corpus) -> SheepOpConfig:
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
    batches: Batches,
    state: TrainingState,
    console: Console,
) -> None:
    steps = config.training.resolved().total_steps
    epochs = steps * config.training.global_batch_size / batches.num_samples
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
