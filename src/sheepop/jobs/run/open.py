"""Opens a run: a new one, one that resumes, or one that the first rank has prepared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory, resolve_model_directory
from sheepop.core.config import leaves, merge, validate
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.facts import counted
from sheepop.core.files import require_writable
from sheepop.core.interrupts import interrupts_advise
from sheepop.core.keys import may_change
from sheepop.core.plugins import require_plugins
from sheepop.jobs import task as tasks
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import RunRecord, StageTimes, StoredRun, read_run_config, write_run_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import fitted, prepare_process, require_arithmetic, resolved
from sheepop.jobs.task import Task
from sheepop.jobs.task.fork import Fork
from sheepop.jobs.task.interface import with_training
from sheepop.posttrain.config import Method
from sheepop.train.schedule import Pace

_BUDGET = {"training.max_epochs", "training.max_tokens", "training.max_minutes"}


@dataclass
class OpenRun:
    """A run ready to train: its task with resolved settings, its directory and its record.

    A run that `resumes` continues from its last good checkpoint.
    """

    request: RunRequest
    device: str
    directory: RunDirectory
    task: Task
    record: RunRecord
    resumes: bool = False
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def config(self) -> SheepOpConfig:
        """The resolved settings."""
        return self.task.config

    @property
    def console(self) -> Console:
        """The console of the first rank; the others are silent."""
        return self.request.console if self.request.ranks.is_first else Console.silent()

    def write_pace(self, pace: Pace) -> None:
        """Writes a changed number of steps into the settings of the run."""
        if self.request.ranks.is_first:
            write_run_config(self.directory, with_training(self.config, self.config.training.at_pace(pace)))


class FollowedRun(RunDirectory):
    """The directory of a run as the ranks after the first see it: they read it and change nothing."""

    def _leave(self, *given: Any, **named: Any) -> None:
        """Does nothing; the first rank marks and removes checkpoints."""

    mark_best = forget_best = prune = forget_after = mark_latest = _leave


@dataclass(frozen=True)
class Start:
    """What a run starts with: the stored run that it resumes, if any, and its settings.

    `config` are the requested settings; if the run resumes, with everything that is resolved.
    """

    stored: StoredRun | None
    requested: SheepOpConfig
    config: SheepOpConfig


def find_start(request: RunRequest) -> Start:
    """Reads the stored run, and merges its settings with the given ones."""
    stored = find_resumable(request.path) if request.resumes else None
    if stored is None:
        return Start(None, request.settings, request.settings)
    requested, config = with_changes(stored, request.given, request.path)
    return Start(stored, requested, config)


def open_run(request: RunRequest, prepare: Callable[[Task, StageTimes], None] = lambda task, times: None) -> OpenRun:
    """Opens the run that was requested, under its lock; other ranks open what the first one has prepared.

    For a new run `prepare` may do more with its data, before the rest of a budget in minutes is planned.
    Raises `ConfigError`, `UsageError`, `DataError` or `CheckpointError` for a run that cannot be started or resumed.
    """
    ranks = request.ranks
    with ranks.together():
        start = find_start(request)
    device = prepare_process(start.config, ranks)
    run = None
    with ranks.together():
        if ranks.is_first and start.stored is not None:
            run = _resumed(request, start.stored, start, device)
        elif ranks.is_first:
            with interrupts_advise(f"No step was taken and nothing was left in {request.path}. Run the command again."):
                run = _new(request, device, prepare)
    resumes = ranks.told(start.stored is not None)
    with ranks.together():
        return run or followed(request, device, resumes=resumes)


def task_of(config: SheepOpConfig, run: RunDirectory, console: Console, origin: Fork | None = None) -> Task:
    """The task of these settings; only the module of its kind is loaded."""
    kinds: dict[Method | None, Callable[[], type[Task]]] = {
        None: lambda: tasks.CorpusTask,
        "sft": lambda: tasks.SupervisedTask,
        "dpo": lambda: tasks.PreferenceTask,
        "reward": lambda: tasks.RewardTask,
        "ppo": lambda: tasks.ProximalPolicyTask,
        "grpo": lambda: tasks.GroupPolicyTask,
        "distill": lambda: tasks.DistillTask,
    }
    return kinds[config.tuning.method]()(config, run, console, origin)


def with_local_data(request: RunRequest) -> RunRequest:
    """The request with the datasets on the hub that its task reads downloaded, and files in place of their names."""
    return request.reading(task_of(request.settings, RunDirectory(request.path), request.console).local_paths())


def _new(request: RunRequest, device: str, prepare: Callable[[Task, StageTimes], None]) -> OpenRun:
    """A new run, with all that is derived or measured before its first step."""
    path, console, times = request.path, request.console, StageTimes(request.began)
    if request.fork is not None:
        resolve_model_directory(request.fork, console)  # which fetches a published model
    replaces = request.replaces or request.resumes
    completed = request.completed()
    requested = completed.config.model_copy(update={"output_dir": str(path)})
    origin = None if request.fork is None else Fork(request.fork)
    task = task_of(requested, RunDirectory(path), console, origin)
    inputs = [Path(place) for place in (*task.inputs, request.fork) if place is not None]
    if origin is not None:
        console.info(f"Reading the model {request.fork}.")
    with RunDirectory.starting(path, overwrite=replaces, reading=inputs) as directory:
        with times(task.stage):
            task = task.prepared(request.given, request.ranks.size)
        prepare(task, times)
        with times("Measuring"):
            task = task.settled()
            is_open = task.config.training.micro_batch_size is None
            task = fitted(task, request.ranks, device, is_open=is_open)
            task, record = resolved(task, requested, completed.chosen, request, device, times)
            record.write(directory)
            write_run_config(directory, task.config)
    return OpenRun(request, device, directory, task, record, times=times)


def _resumed(request: RunRequest, stored: StoredRun, start: Start, device: str) -> OpenRun:
    """The stored run, with the settings it continues with."""
    path, console = request.path, request.console
    before = stored.record.forked_from
    if request.fork is not None and not _is_origin(request.fork, before):
        started = "new weights" if before is None else before["path"]
        raise ConfigError(
            f"The run in {path} started from {started}, not from {request.fork}. Leave the model out to resume the "
            "run, or start a new run with another --output."
        )
    run = RunDirectory.open(path)
    run.remove_leftovers()
    require_writable(run.checkpoints)
    if not run.steps():
        if before is not None:
            raise CheckpointError(
                f"The run in {path} was stopped before it had saved the weights it started from. Start it again with "
                f"--fork {shlex.quote(before['path'])} --overwrite."
            )
        console.warn(f"{path} has no checkpoint, so the run starts from the beginning.")
    task = _reopened(stored, start.config, run, console)
    task.check()
    task = fitted(task, request.ranks, device, is_open=start.requested.training.micro_batch_size is None)
    require_arithmetic(task.config, device)
    record = stored.record.resumed_at(
        stored.step,
        start.requested,
        device,
        request.command,
        keeps_steps=task.config.training.max_steps == stored.config.training.max_steps,
    )
    write_run_config(run, task.config)
    record.write(run)
    return OpenRun(request, device, run, task, record, resumes=True)


def _is_origin(path: Path, recorded: Mapping[str, Any] | None) -> bool:
    """Whether `path` is the model in the record of a fork, or the run whose checkpoint that was."""
    if recorded is None:
        return False
    before, now = Path(str(recorded.get("path"))), path.resolve()
    if not path.exists():
        now = resolve_model_directory(path).resolve()
    return now == before or RunDirectory(now).checkpoints == before.parent


def followed(request: RunRequest, device: str, *, resumes: bool) -> OpenRun:
    """The run that the first rank, or another process, has prepared; nothing in its directory is changed."""
    stored = find_resumable(request.path)
    if stored is None:
        raise CheckpointError(
            f"The first rank has prepared the run in {request.path.absolute()}, and this one does not find it. Give an "
            "--output on a file system that all machines share."
        )
    run = FollowedRun(request.path)
    task = _reopened(stored, stored.config, run, Console.silent())  # and refuses other data than the first rank's
    return OpenRun(request, device, run, task, stored.record, resumes=resumes)


def _reopened(stored: StoredRun, config: SheepOpConfig, run: RunDirectory, console: Console) -> Task:
    """The task of a stored run that continues with `config` and the data that it started with."""
    task = task_of(config, run, console)
    task.require_data_of(stored.record.requested)
    before = stored.record.corpus_fingerprint
    if task.fingerprint != before:
        raise CheckpointError(
            f"The data in {task.directory} is not what this run was started with ({task.fingerprint[:12]} instead of "
            f"{before[:12]}). {_how_to_fork(run.path)}"
        )
    return task


def find_resumable(path: Path) -> StoredRun | None:
    """The run at `path`; None if none was started there (an interrupted preparation is not a run yet).

    Raises `CheckpointError` for checkpoints without their configuration or record, or if one of these was edited or
    damaged.
    """
    run = RunDirectory(path)
    if not run.has_started():
        return None
    if not run.config_file.is_file():
        raise CheckpointError(
            f"{run.checkpoints} holds checkpoints, but {run.config_file} is missing, so the run cannot be resumed. "
            f"Restore that file. {_how_to_fork(run.checkpoint(run.steps()[-1]))}"
        )
    if not run.record_file.exists():
        raise CheckpointError(
            f"{run.record_file} is missing, so the run cannot be resumed. Restore that file. {_how_to_fork(path)}"
        )
    record = RunRecord.read(run)
    require_plugins(record.plugins)  # whose names the configuration may use
    return StoredRun(read_run_config(run), record, max(run.steps(), default=0))


def with_changes(stored: StoredRun, given: Mapping[str, Any], path: Path) -> tuple[SheepOpConfig, SheepOpConfig]:
    """The requested and the resolved configuration with which the run at `path` resumes.

    Requested are the settings of its last start, overridden by those `given` now. Raises `ConfigError` naming every
    setting that would make it another run.
    """
    requested = validate(SheepOpConfig, merge(stored.record.requested, {**given, "output_dir": str(path)}))
    # A setting that did not exist yet when the run was started has its default, which may follow from other settings.
    usual = stored.config.model_dump(mode="json")
    before = {**dict(leaves(usual)), **dict(leaves(stored.record.requested))}
    after = dict(leaves(requested.model_dump(mode="json")))
    if after["training.compile"] is None and before["training.compile"] is False:
        before["training.compile"] = None  # the older default, which null means on a CPU
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    allowed = may_change(SheepOpConfig)
    refused = [key for key in changed if key not in allowed]
    if refused:
        what = "; ".join(f"{key} was {before.get(key)!r} and is now {after[key]!r}" for key in refused)
        longer = " To train for longer, raise training.max_steps." if _BUDGET.intersection(refused) else ""
        raise ConfigError(f"A resumed run keeps its settings, but {what}.{longer} {_how_to_fork(path)}")
    if "training.activation_checkpointing" in changed:  # auto chose the blocks for the mode it chose
        changed["training.checkpointed_blocks"] = after["training.checkpointed_blocks"]
    if "training.max_steps" in changed:  # which was made from the former steps
        changed["training.pace"] = []
    paced = stored.config.training.paced_intervals
    changed["training.paced_intervals"] = [name for name in paced if f"training.{name}" not in changed]
    tree = stored.config.model_dump(mode="json")
    for key, value in changed.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    config = validate(SheepOpConfig, tree)
    try:
        steps = config.training.resolved().total_steps
    except ValueError as error:
        raise ConfigError(
            f"A resumed run keeps the values it started with and derives none again, but these are {error}. Give a "
            "value, or leave the key out."
        ) from None
    if steps < stored.step:
        raise ConfigError(
            f"training.max_steps = {steps}, but the run has already taken {counted(stored.step, 'step')}. Give at "
            "least as many."
        )
    return requested, config


def _how_to_fork(path: Path) -> str:
    return (
        "Start a new run with another --output; to start it from the weights of this one, add "
        f"--fork {shlex.quote(str(path))}."
    )
