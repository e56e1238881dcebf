"""Trains a model: corpus, plan, loop, scores, pictures. A run directory holds everything it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sheepop.checkpoint import RunDirectory, load_model, resolve_model_directory
from sheepop.checkpoint.model_directory import PROVENANCE
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError, Interrupted, SheepOpError, StorageError
from sheepop.core.files import read_json, require_writable
from sheepop.core.interrupts import interrupts_advise
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.layout import asked_of, check_layout, followed, require_agreement, shared_steps
from sheepop.jobs.policy_tuning import GroupPolicyData, ProximalPolicyData
from sheepop.jobs.preference_tuning import PreferenceData, RewardData
from sheepop.jobs.pretraining import Pretraining
from sheepop.jobs.resume import find_resumable, refuse_changes
from sheepop.jobs.run_kind import RunData, RunKind
from sheepop.jobs.run_record import Request, RunRecord, StoredRun, resume_command, write_run_config
from sheepop.jobs.run_report import write_run_report
from sheepop.jobs.settling import check_settings, prepare_process, require_arithmetic, resolved
from sheepop.jobs.stage_times import StageTimes
from sheepop.jobs.supervised_tuning import SupervisedData
from sheepop.jobs.training_run import ReadyRun, run_loop
from sheepop.jobs.tuning import Tuning, first_of
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import Method
from sheepop.posttrain.encoding import Example
from sheepop.tokenizer import Tokenizer
from sheepop.train import Scores
from sheepop.train.metrics import SCORE, JsonLines
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
    ranks: Ranks | None = None,
) -> TrainOutcome:
    """Runs `config` from its data to its report and returns the best checkpoint's scores (see `run_training`)."""
    if ranks is None:
        with Ranks.joined() as ranks:
            require_agreement(ranks, config.model_dump(mode="json"))
            return train(
                config,
                resume=resume,
                overwrite=overwrite,
                fork=fork,
                console=console,
                profile_steps=profile_steps,
                request=request,
                ranks=ranks,
            )
    check_layout(config, ranks)
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
            ranks=ranks,
        )
        if not ranks.is_first:
            return outcome
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
    ranks: Ranks = ALONE,
) -> TrainOutcome:
    """Runs `config` from its data to the scores of its best checkpoint; the stages' times are added to `times`.

    With `profile_steps` that many steps are profiled into the run's ``profile/``. `request`, how it was asked
    for, is kept in its record.

    With `resume` a run that `config.output_dir` already holds goes on exactly where its last good checkpoint
    stands; without a run there it starts, with the weights of the model that `fork` means if given. Raises
    `Interrupted` after a signal, with everything saved, and `CheckpointError` while another process works on the run.

    Of several `ranks` the first prepares the run, and speaks; the others then open it. One that began anew because
    another was lost resumes.
    """
    console = (console if ranks.is_first else None) or Console.silent()
    path = Path(config.output_dir) if config.output_dir else default_run_path()
    resume, overwrite = resume or ranks.restarts > 0, overwrite and not ranks.restarts
    with _locked(path, console) if ranks.is_first else nullcontext():
        require_sinks(config.training.sinks)
        device = resolve_device(config.device)
        ranks.connect(device)
        times = times or StageTimes()
        prepare_process(config, device)  # before a step is measured: deterministic algorithms may be slower
        ready = None
        with ranks.together():
            if ranks.is_first:
                stored = find_resumable(path) if resume else None
                if stored is None:
                    ready = _started(config, path, overwrite or resume, fork, device, console, times, request, ranks)
                else:
                    ready = _gone_on(stored, config, path, device, console, request, ranks)
        resumes = ranks.told(ready is not None and ready.resumes)
        with ranks.together():
            ready = ready or _followed(path, resumes=resumes)
        try:
            with times("Training"):
                config = run_loop(ready, device, console, ranks=ranks, profile_steps=profile_steps)
        except Interrupted:
            if not ranks.is_first:
                raise
            # Everything is saved by now; a report that fails must not hide that.
            try:
                write_run_report(ready.run, None, record_times(ready.run, times))
            except SheepOpError as error:
                console.warn(f"The report was not written: {error}")
            raise
        with times("Scoring"), ranks.together():
            if ranks.is_first:
                return score_run(ready.run, ready.data, config, device, console)
        return _outcome(ready.run, ready.data, config)


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    with RunDirectory(path).locked() as is_locked:
        if not is_locked:
            console.warn(
                f"The file system of {path} does not support file locks. Make sure that no other process uses this run."
            )
        yield


def _started(
    asked: SheepOpConfig,
    path: Path,
    overwrite: bool,
    fork: Path | None,
    device: str,
    console: Console,
    times: StageTimes,
    request: Request,
    ranks: Ranks,
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
            config = shared_steps(config, ranks, is_open=config.training.micro_batch_size is None)
            check_settings(config, data, device)
            config, record = resolved(config, asked, run, data, device, console, origin, request, ranks.size)
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
    stored: StoredRun,
    asked: SheepOpConfig,
    path: Path,
    device: str,
    console: Console,
    request: Request,
    ranks: Ranks,
) -> ReadyRun:
    """The run at `path`, with the settings that it goes on with."""
    run = RunDirectory.open(path)
    run.remove_leftovers()
    require_writable(run.checkpoints)
    data = kind_of(stored.config).reopen(stored, asked, run, console)
    config = refuse_changes(stored, asked, data, path)
    config = shared_steps(config, ranks, is_open=asked.training.micro_batch_size is None)
    keeps_steps = config.training.max_steps == stored.config.training.max_steps
    record = stored.record.going_on(
        asked=asked, step=stored.step, device=device, keeps_steps=keeps_steps, request=request
    )
    data.check(config)
    check_settings(config, data, device)
    require_arithmetic(config, device)
    write_run_config(run, config)
    record.write(run)
    return ReadyRun(config, run, data, record, resumes=True)


def _followed(path: Path, *, resumes: bool) -> ReadyRun:
    """The run at `path` as the first rank has prepared it."""
    stored, run = followed(path)
    asked = asked_of(stored)
    data = kind_of(stored.config).reopen(stored, asked, run, Console.silent())
    config = refuse_changes(stored, asked, data, path)  # which also says where the data here is other data
    return ReadyRun(config, run, data, stored.record, resumes=resumes)


def default_run_path() -> Path:
    """``runs/`` and the date and time, to the second."""
    return Path("runs") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")


def score_run(run: RunDirectory, data: RunData, config: SheepOpConfig, device: str, console: Console) -> TrainOutcome:
    """The best checkpoint's scores on everything that is held out."""
    outcome, held_out = _outcome(run, data, config), data.held_out(config)
    if held_out is None:
        return outcome
    loaded = load_model(run.path, device)
    with console.progress("Scoring", held_out.num_samples, "samples") as progress:
        scores = data.score(loaded.model, held_out, config, device, on_batch=progress.advance)
    _log_score(run, outcome.best_step, scores)
    return replace(outcome, scores=scores)


def _outcome(run: RunDirectory, data: RunData, config: SheepOpConfig) -> TrainOutcome:
    provenance = read_json(resolve_model_directory(run.path) / PROVENANCE)
    last = run.steps()[-1]
    return TrainOutcome(
        run.path,
        last,
        int(provenance["tokens"]),
        int(provenance["step"]),
        ended_early=last < config.training.resolved().total_steps,
        try_out=data.try_out(run.path, config),
    )


def _log_score(run: RunDirectory, step: int, scores: Scores) -> None:
    """Writes the score of a finished run as the last row of its metrics; more steps will take its place."""
    with closing(JsonLines(run.metrics_file, run.metrics_file.stat().st_size)) as metrics:
        metrics.append({"step": step, "split": SCORE, **scores.to_dict()})
        metrics.sync()
