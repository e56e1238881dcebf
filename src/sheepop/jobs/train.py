"""Trains a model: corpus, plan, loop, scores, pictures. A run directory holds everything it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError, DeviceError, Interrupted, SheepOpError, StorageError
from sheepop.core.files import require_writable
from sheepop.core.freed_memory import keep_freed_memory
from sheepop.core.interrupts import interrupts_advise
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.core.speed import matrix_peak, nominal_peak
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.policy_tuning import GroupPolicyData, ProximalPolicyData
from sheepop.jobs.preference_tuning import PreferenceData, RewardData
from sheepop.jobs.pretraining import Pretraining
from sheepop.jobs.resume import find_resumable, refuse_changes
from sheepop.jobs.run_kind import RunData, RunKind, with_training
from sheepop.jobs.run_record import Budget, Request, RunRecord, StoredRun, resume_command, write_run_config
from sheepop.jobs.run_report import write_run_report
from sheepop.jobs.stage_times import StageTimes
from sheepop.jobs.supervised_tuning import SupervisedData
from sheepop.jobs.training_run import ReadyRun, build_network, bytes_of_a_step, run_loop
from sheepop.jobs.tuning import Tuning, first_of
from sheepop.model import blank_model, num_parameters
from sheepop.model.attention.choose import require_backend
from sheepop.posttrain.config import Method
from sheepop.posttrain.encoding import Example
from sheepop.tokenizer import Tokenizer
from sheepop.train import Scores, check_layers
from sheepop.train.activation_checkpointing import resolve_activation_checkpointing
from sheepop.train.budget import (
    loop_seconds,
    measure_step,
    measuring_seconds,
    most_steps,
    needs_measuring,
    resolve_compile,
    resolve_training,
)
from sheepop.train.metrics import SCORE, JsonLines
from sheepop.train.precision import check_precision, choose_matrix_arithmetic, torch_dtype
from sheepop.train.sinks import require_sinks

_PROGRAM = Request()
_KINDS: dict[Method | None, RunKind] = {
    None: Pretraining(),
    "sft": Tuning(SupervisedData),
    "reward": Tuning(RewardData),
    "dpo": Tuning(PreferenceData),
    "ppo": Tuning(ProximalPolicyData),
    "grpo": Tuning(GroupPolicyData),
}


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run left."""

    run: Path
    steps: int
    tokens: int
    best_step: int
    ended_early: bool  # because the held-out loss no longer fell
    scores: Scores | None = None  # of the best checkpoint on the whole held-out split, if one is held out
    try_out: str | None = None  # what to type to try the model

    @property
    def report(self) -> Path:
        """The page about the run."""
        return RunDirectory(self.run).report


def train(
    config: SheepOpConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fork: Path | None = None,
    console: Console | None = None,
    profile_steps: int | None = None,
    request: Request = _PROGRAM,
) -> TrainOutcome:
    """Runs `config` from its data to its report and returns the best checkpoint's scores (see `run_training`)."""
    times = StageTimes()
    path = config.output_dir or str(default_run_path())
    config = config.model_copy(update={"output_dir": path})
    with interrupts_advise(f"Resume with: {resume_command(path)}"):
        outcome = run_training(
            config,
            resume=resume,
            overwrite=overwrite,
            fork=fork,
            console=console,
            times=times,
            profile_steps=profile_steps,
            request=request,
        )
        run = RunDirectory.open(outcome.run)
        try:
            write_run_report(run, outcome.scores, record_times(run, times))
        except StorageError as error:
            raise StorageError(
                f"{error} Training itself is finished and saved; to write the report: {resume_command(path)}"
            ) from None
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
    request: Request = _PROGRAM,
) -> TrainOutcome:
    """Runs `config` from its data to the scores of its best checkpoint; the stages' times are added to `times`.

    With `profile_steps` that many steps are profiled into the run's ``profile/``. `request`, how it was asked
    for, is kept in its record.

    With `resume` a run that `config.output_dir` already holds goes on exactly where its last good checkpoint
    stands; without a run there it starts, with the weights of the model that `fork` means if given. Raises
    `Interrupted` after a signal, with everything saved, and `CheckpointError` while another process works on the run.
    """
    console = console or Console.silent()
    path = Path(config.output_dir) if config.output_dir else default_run_path()
    with RunDirectory(path).locked() as is_locked:
        if not is_locked:
            console.warn(
                f"The file system of {path} does not support file locks. Make sure that no other process uses this run."
            )
        require_sinks(config.training.sinks)
        device = resolve_device(config.device)
        times = times or StageTimes()
        stored = find_resumable(path) if resume else None
        prepare_process(config, device)  # before a step is measured: deterministic algorithms may be slower
        if stored is None:
            ready = _started(config, path, overwrite or resume, fork, device, console, times, request)
        else:
            ready = _gone_on(stored, config, path, device, console, request)
        try:
            with times("Training"):
                config = run_loop(ready, device, console, profile_steps=profile_steps)
        except Interrupted:
            # Everything is saved by now; a report that fails must not hide that.
            try:
                write_run_report(ready.run, None, record_times(ready.run, times))
            except SheepOpError as error:
                console.warn(f"The report was not written: {error}")
            raise
        with times("Scoring"):
            return score_run(ready.run, ready.data, config, device, console)


def _started(
    asked: SheepOpConfig,
    path: Path,
    overwrite: bool,
    fork: Path | None,
    device: str,
    console: Console,
    times: StageTimes,
    request: Request,
) -> ReadyRun:
    """A new run, with all that is derived or measured before its first step."""
    kind, origin = kind_of(asked), None if fork is None else Fork(fork)
    inputs = [Path(place) for place in (*kind.inputs(asked), fork) if place is not None]
    with (
        interrupts_advise(f"No step was taken and nothing was left in {path}. Run the command again."),
        RunDirectory.starting(path, overwrite=overwrite, reading=inputs) as run,
    ):
        with times(kind.stage):
            config, data = kind.open(asked, run, origin, console)
        with times("Measuring"):
            config = data.settle(config, console)
            _check_settings(config, data, device)
            config, record = _resolved(config, asked, run, data, device, console, origin, request)
            record.write(run)
            write_run_config(run, config)
    return ReadyRun(config, run, data, record, origin)


def kind_of(config: SheepOpConfig) -> RunKind:
    """The kind of run that `config` describes."""
    return _KINDS[config.tuning.method]


def examples_of(config: SheepOpConfig, model: Path, count: int) -> Iterator[tuple[str, Example, Tokenizer]]:
    """The first examples that a run of post-training from `model` would learn from, with their places."""
    kind = kind_of(config)
    if not isinstance(kind, Tuning):
        raise ConfigError("Examples are what post-training learns from: set tuning.method.")
    return first_of(config, kind.data, model, count)


def record_times(run: RunDirectory, times: StageTimes) -> RunRecord:
    """Adds the stages of a session that has ended to the record of its run."""
    record = RunRecord.read(run).with_times(times.seconds)
    record.write(run)
    return record


def _gone_on(
    stored: StoredRun, asked: SheepOpConfig, path: Path, device: str, console: Console, request: Request
) -> ReadyRun:
    """The run at `path`, with the settings that it goes on with."""
    run = RunDirectory.open(path)
    require_writable(run.checkpoints)
    data = kind_of(stored.config).reopen(stored, asked, run, console)
    config = refuse_changes(stored, asked, data, path)
    keeps_steps = config.training.max_steps == stored.config.training.max_steps
    record = stored.record.going_on(
        asked=asked, step=stored.step, device=device, keeps_steps=keeps_steps, request=request
    )
    data.check(config)
    _check_settings(config, data, device)
    _require_arithmetic(config, device)
    write_run_config(run, config)
    record.write(run)
    return ReadyRun(config, run, data, record, resumes=True)


def default_run_path() -> Path:
    """``runs/`` and the date and time, to the second."""
    return Path("runs") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")


def score_run(run: RunDirectory, data: RunData, config: SheepOpConfig, device: str, console: Console) -> TrainOutcome:
    """The best checkpoint's scores on everything that is held out."""
    loaded = load_model(run.path, device)
    steps, provenance = run.steps(), loaded.provenance
    early = steps[-1] < config.training.resolved().total_steps
    outcome = TrainOutcome(run.path, steps[-1], int(provenance["tokens"]), int(provenance["step"]), early)
    outcome = replace(outcome, try_out=data.try_out(run.path, config))
    held_out = data.held_out(config)
    if held_out is None:
        return outcome
    with console.progress("Scoring", held_out.num_samples, "samples") as progress:
        scores = data.score(loaded.model, held_out, config, device, on_batch=progress.advance)
    _log_score(run, outcome.best_step, scores)
    return replace(outcome, scores=scores)


def _log_score(run: RunDirectory, step: int, scores: Scores) -> None:
    """Writes the score of a finished run as the last row of its metrics; more steps will take its place."""
    with closing(JsonLines(run.metrics_file, run.metrics_file.stat().st_size)) as metrics:
        metrics.append({"step": step, "split": SCORE, **scores.to_dict()})
        metrics.sync()


def _resolved(
    config: SheepOpConfig,
    asked: SheepOpConfig,
    run: RunDirectory,
    data: RunData,
    device: str,
    console: Console,
    fork: Fork | None,
    request: Request,
) -> tuple[SheepOpConfig, RunRecord]:
    """Fills in what is derived or measured, before the first step."""
    batches = data.batches(config)
    training = resolve_compile(config.training, device)
    with torch.device("meta"):
        check_layers(dict(blank_model(config.model).named_parameters()), training.layers)
    if training.compile and device == "cpu" and not _has_compiler():
        if training.compile is True:
            console.warn(
                "training.compile needs a C++ compiler and Python's headers, which were not found; "
                "the run continues without it."
            )
        training = training.replace(compile=False)
    training = resolve_activation_checkpointing(
        training, lambda: bytes_of_a_step(config, training, batches.max_length, device), device
    )
    timing = None
    if needs_measuring(training, device):
        timing = measure_step(
            lambda: build_network(data, with_training(config, training), device),
            batches,
            data.objective(with_training(config, training)),
            training,
            device,
            seconds=measuring_seconds(training),
            console=console,
        )
    validation_tokens = data.held_out_tokens
    num_samples = data.plan(config, run, console).num_samples
    training = resolve_training(
        training,
        timing,
        device=device,
        num_samples=num_samples,
        seq_len=batches.tokens_per_sample,
        validation_tokens=min(validation_tokens, training.eval_tokens or validation_tokens),
    )
    settings = training.resolved()
    if asked.training.eval_interval is not None and validation_tokens == 0:
        console.warn(
            "training.eval_interval is set, but no text is held out, so there will be no validations. "
            "Raise data.validation_fraction in a new run to have them."
        )
    if config.training.warmup_steps is not None and settings.warmup_steps >= settings.total_steps:
        console.warn(
            f"training.warmup_steps = {settings.warmup_steps} is not over when the run ends after "
            f"{settings.total_steps} steps, so the learning rate never reaches {training.learning_rate}."
        )
    seconds = loop_seconds(config.training, timing)
    most = most_steps(config.training, num_samples, batches.tokens_per_sample)
    record = RunRecord.create(
        data.fingerprint,
        data.tokenizer().fingerprint(),
        asked=asked,
        step_seconds=timing.seconds if timing else None,
        deadline=None if seconds is None else Budget(seconds, most),
        matrix_peak_flops=matrix_peak(torch_dtype(training.precision), device),
        nominal_peak_flops=nominal_peak(torch_dtype(training.precision), device),
        fork=fork,
        device=device,
        num_parameters=num_parameters(config.model),
        request=request,
    )
    return with_training(config, training), record


def _check_settings(config: SheepOpConfig, data: RunData, device: str) -> None:
    """Refuses before a step is taken what would end the run in its middle, or be ignored."""
    narrowest = min(config.model.head_size, config.model.value_size)
    require_backend(config.model.attention_backend, torch.device(device), narrowest)
    if config.training.early_stopping is not None and data.held_out_tokens == 0:
        raise ConfigError(
            "training.early_stopping watches the loss on held-out text, but no text is held out. "
            "Raise data.validation_fraction in a new run, or leave early_stopping out."
        )
    data.asked(config)


def _require_arithmetic(config: SheepOpConfig, device: str) -> None:
    """Raises `DeviceError` when a run cannot go on here with the arithmetic that it began with."""
    settings = config.training.resolved()
    check_precision(settings.precision, device)
    if settings.compile and device == "cpu" and not _has_compiler():
        raise DeviceError(
            "This run uses training.compile = true, but no C++ compiler with Python's headers was found. "
            "Install them (`sheepop doctor` says how), or resume on a machine that has them."
        )


def prepare_process(config: SheepOpConfig, device: str) -> None:
    """Sets for this process how `device` computes, as `config.deterministic` says, and that it keeps its memory.

    What CUDA's library of products needs for it is set by `resolve_device`, before CUDA starts.
    """
    choose_matrix_arithmetic(device)
    keep_freed_memory(device)
    torch.use_deterministic_algorithms(config.deterministic)
    # Filling memory that is about to be written costs time; no kernel used here reads it before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic


def _has_compiler() -> bool:
    return find_compiler() is not None and has_python_headers()
