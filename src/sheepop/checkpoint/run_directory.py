"""The directory of a training run: names, lock, checkpoints that are whole or absent, their retention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import (
    CHECKSUMS,
    TEMPORARY_MARK,
    atomic_directory,
    damaged_files,
    is_left_behind,
    make_directory,
    remove_partial,
    remove_tree,
    storage_errors,
    write_atomic,
)
from sheepop.core.locks import exclusive_lock, is_locked

CARD = "README.md"
_POINTERS = frozenset({"latest", "best"})
_STEP_NAME = re.compile(r"step-(\d{8,})")


class _Entry:
    """A file or folder of a run, by its name in the directory: the path of it in each `RunDirectory`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, run: None, owner: type) -> _Entry: ...

    @overload
    def __get__(self, run: RunDirectory, owner: type) -> Path: ...

    def __get__(self, run: RunDirectory | None, owner: type) -> _Entry | Path:
        return self if run is None else run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Everything that one run leaves on disk: what each file is called, its lock, and its checkpoints."""

    path: Path

    config_file = _Entry("config.yaml")
    """The resolved configuration."""
    record_file = _Entry("environment.json")
    """Where and with what the run was started."""
    metrics_file = _Entry("metrics.jsonl")
    """One JSON object a line: the one source of truth about the run's course."""
    samples_file = _Entry("samples.jsonl")
    """Text written by the model while it was trained, one JSON object a line."""
    report = _Entry("report.html")
    """How the run went, for a browser."""
    plots = _Entry("plots")
    """Pictures of the metrics."""
    profile = _Entry("profile")
    """What profiled steps took."""
    stacks = _Entry("stacks")
    """Where every rank stood when a step took too long."""
    traces = _Entry("traces")
    """What a prompt met on its way through the network, at several steps."""
    tensorboard = _Entry("tensorboard")
    """The metrics for TensorBoard."""
    wandb = _Entry("wandb")
    """The metrics for Weights & Biases."""
    corpus = _Entry("corpus")
    """The corpus, when the run built its own."""
    corpus_in_work = _Entry(".corpus.building")
    """That corpus, while it is built."""
    base = _Entry("base")
    """The model beside whose weights a run learns a change."""
    examples = _Entry("examples")
    """The examples of post-training, tokenised."""
    difficulty = _Entry("difficulty.safetensors")
    """How difficult each row of the corpus is, for runs that begin with the easy ones."""
    checkpoints = _Entry("checkpoints")
    """The directory of checkpoints and of the pointers to the latest and best."""
    lock = _Entry(".lock")
    """Held by the process that works on the run."""
    replaced = _Entry(".replaced")
    """Where a run waits that a new one is about to replace."""
    moving = _Entry(".replaced-moving")
    """Where that run is while its parts are moved there or back."""

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunDirectory:
        """Prepares a directory for a new run.

        Refuses one that holds a run, unless `overwrite`; one that holds anything else, beside a run or alone, is
        always refused, so that no mistyped path costs somebody's files.
        """
        with cls.starting(path, overwrite=overwrite) as run:
            return run

    @classmethod
    @contextmanager
    def starting(
        cls, path: str | Path, *, overwrite: bool = False, reading: Sequence[Path] = ()
    ) -> Iterator[RunDirectory]:
        """As `create`, for good only when the block succeeds: else the place is left as it was, an old run included.

        `reading` are the paths that the new run is made from; none of them may be part of the run that it replaces.
        """
        run = cls(Path(path))
        existed = run.path.is_dir()
        with storage_errors(run.path):
            run.require_place(overwrite, reading)
            if existed:
                run._set_aside()
        try:
            with storage_errors(run.path):
                make_directory(run.checkpoints)
            yield run
        except BaseException:
            run._put_back()
            if not existed:
                remove_tree(run.path)
            raise
        remove_tree(run.replaced)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Keeps other processes from working on this run; false where the file system cannot.

        Raises `CheckpointError` when one does, and `UsageError` for a directory of something else.
        """
        self._require_empty_or_run()
        with storage_errors(self.path):
            existed = self.path.is_dir()
            make_directory(self.path)
        refusal = CheckpointError(
            f"Another process is working on the run in {self.path}. Wait for it, or choose another output directory."
        )
        with exclusive_lock(self.lock, refusal) as held:
            try:
                yield held
            finally:
                # Under the lock: what another process begins here a moment later is not removed with it.
                if not existed and not self._entries():
                    remove_tree(self.path)

    def is_running(self) -> bool:
        """Whether a process works on this run now."""
        return is_locked(self.lock)

    def _entries(self) -> list[Path]:
        """What is in the directory, if it is there, beside the lock."""
        return [entry for entry in self.path.iterdir() if entry != self.lock] if self.path.is_dir() else []

    def _require_empty_or_run(self) -> None:
        if self._entries() and not self.holds_run():
            raise UsageError(f"The output directory {self.path} is not empty and is not a run. Choose another one.")

    def require_place(self, overwrite: bool, reading: Sequence[Path] = ()) -> None:
        """Raises `UsageError` where `starting` would refuse to begin a run."""
        self._require_empty_or_run()
        if not self._entries():
            return
        if not overwrite:
            raise UsageError(
                f"The output directory {self.path} already holds a run. Resume it (--resume auto), replace it "
                "(--overwrite), or choose another one."
            )
        if foreign := self._foreign_entry():
            raise UsageError(
                f"The output directory {self.path} is not replaced, because {foreign} is not part of a run. "
                "Move it away, or choose another directory."
            )
        if link := min((entry for entry in self.path.iterdir() if entry.is_symlink()), default=None):
            raise UsageError(
                f"The output directory {self.path} is not replaced, because {link} is a link to another place, which "
                "would be left behind. Remove the run yourself, or choose another directory."
            )
        place = self.path.resolve()
        if needed := [path for path in reading if place in (path.resolve(), *path.resolve().parents)]:
            raise UsageError(
                f"The new run would be made from {needed[0]}, which is part of the run in {self.path} that it would "
                "replace. Choose another output directory."
            )

    def _set_aside(self) -> None:
        """Moves what is here into a folder of its own, after putting back what a killed start had moved there."""
        self._move_back()
        if self.replaced.is_dir() and not self.config_file.is_file():
            self._put_back()
        remove_tree(self.replaced)
        entries = self._entries()
        if not entries:
            return
        self.moving.mkdir()
        try:
            # The configuration first, and last on the way back: no run without all of its parts looks like one.
            for entry in sorted(entries, key=lambda entry: entry != self.config_file):
                entry.rename(self.moving / entry.name)
            self.moving.rename(self.replaced)
        except BaseException:
            self._move_back()
            raise

    def _put_back(self) -> None:
        """Removes what a failed start left, then brings back the run that it was to replace."""
        for entry in self._entries():
            if entry != self.replaced:
                remove_tree(entry)
        if self.replaced.is_dir():
            self.replaced.rename(self.moving)
            self._move_back()

    def _move_back(self) -> None:
        """Brings back what is on its way; beside it lies only what came back, or had not left, before a kill."""
        if self.moving.is_dir():
            for entry in sorted(self.moving.iterdir(), key=lambda entry: entry.name == self.config_file.name):
                entry.rename(self.path / entry.name)
            self.moving.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """A directory that holds a run already; raises `CheckpointError` otherwise."""
        run = cls(Path(path))
        if not run.holds_run():
            raise CheckpointError(f"{run.path} is not a run: {run.config_file} is missing.")
        return run

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file() or self.checkpoints.is_dir() or self.is_being_replaced()

    def has_checkpoint(self) -> bool:
        """Whether there is a model to read."""
        return any(self.pointer(name) is not None for name in _POINTERS)

    def is_being_replaced(self) -> bool:
        """Whether a new run has begun to take the place of this one, and was killed before it had."""
        return self.replaced.is_dir() or self.moving.is_dir()

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of `step` is kept."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP_NAME.fullmatch(entry.name) for entry in self.checkpoints.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    @contextmanager
    def write_checkpoint(self, step: int) -> Iterator[Path]:
        """Yields a directory to fill; it becomes the latest checkpoint once it is whole and on the disk."""
        remove_partial(self.checkpoints)
        with atomic_directory(self.checkpoint(step), replace=True) as directory:
            yield directory
        self._point("latest", step)

    def mark_latest(self, step: int) -> None:
        """Points ``latest`` at a finished checkpoint, where a kill or damage left it at another."""
        if self.pointer("latest") != step:
            self._point("latest", step)

    def mark_best(self, step: int) -> None:
        """Points ``best`` at a finished checkpoint."""
        self._point("best", step)

    def forget_best(self) -> None:
        """Leaves no checkpoint marked best, so that the run means its latest."""
        with storage_errors(self.checkpoints):
            (self.checkpoints / "best").unlink(missing_ok=True)

    def pointer(self, name: str) -> int | None:
        """The step that ``latest`` or ``best`` names, or None when it is missing or names no checkpoint."""
        try:
            match = _STEP_NAME.fullmatch((self.checkpoints / name).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None
        step = int(match[1]) if match else None
        return step if step is not None and self.checkpoint(step).is_dir() else None

    def latest_good(self, warn: Callable[[str], None], *, before: int | None = None) -> int | None:
        """The newest step, of those below `before` if given, whose checkpoint is undamaged.

        Every damaged one passed over is named to `warn`.
        """
        for step in reversed([step for step in self.steps() if before is None or step < before]):
            problems = damaged_model(self.checkpoint(step))
            if not problems:
                return step
            warn(f"Checkpoint {self.checkpoint(step)} is skipped: {'; '.join(problems)}.")
        return None

    def remove_leftovers(self) -> None:
        """Removes what a killed process left half written or replaced, and puts back what it had moved; under the lock.

        For a run that has begun.
        """
        self._move_back()
        remove_tree(self.replaced)
        for directory in (self.path, self.plots, self.checkpoints):
            remove_partial(directory)

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Retention: removes the checkpoints up to step `newest` that need not be kept.

        The last `keep_last` stay, the milestones, and those marked best and latest.
        """
        steps = [step for step in self.steps() if step <= newest]
        kept = milestones | {self.pointer("best"), self.pointer("latest")} | set(steps[-keep_last:])
        self._remove(step for step in steps if step not in kept)

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of all later steps, which the run no longer leads to."""
        self._remove(later for later in self.steps() if later > step)

    def _remove(self, steps: Iterable[int]) -> None:
        """A checkpoint is renamed before it is removed, so that a kill in between leaves none half deleted."""
        for step in steps:
            if self.checkpoint(step).is_dir():
                doomed = self.checkpoint(step).with_name(f".{self.checkpoint(step).name}{TEMPORARY_MARK}pruned")
                self.checkpoint(step).rename(doomed)
                remove_tree(doomed)

    def _foreign_entry(self) -> Path | None:
        """Something in this directory, or among its checkpoints, that SheepOp did not write."""
        entries = [entry for entry in self.path.iterdir() if entry.name not in RUN_ENTRIES]
        if self.checkpoints.is_dir():
            found = (entry for entry in self.checkpoints.iterdir() if entry.name not in _POINTERS)
            entries += [entry for entry in found if not _STEP_NAME.fullmatch(entry.name)]
        foreign = (entry for entry in entries if not is_left_behind(entry.name) and entry.name != ".DS_Store")
        return min(foreign, default=None)

    def _point(self, name: str, step: int) -> None:
        write_atomic(self.checkpoints / name, self.checkpoint(step).name + "\n")


# What else lies in the directory of a run is somebody's own.
RUN_ENTRIES = frozenset(entry.name for entry in vars(RunDirectory).values() if isinstance(entry, _Entry))


def resolve_model_directory(path: str | Path) -> Path:
    """The model directory that `path` means: itself, a checkpoint, or a run's best (else latest) checkpoint."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Give a model directory, a checkpoint or a run directory.")
    if (path / "config.json").is_file():
        return path
    run = RunDirectory(path)
    if run.holds_run():
        step = run.pointer("best")
        if step is None:
            step = run.pointer("latest")
        if step is None:
            raise CheckpointError(f"The run in {path} has no finished checkpoint yet.")
        return run.checkpoint(step)
    inside = sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    runs = [folder for folder in inside if RunDirectory(folder).holds_run()]
    raise CheckpointError(
        f"{path} is not a model: it has neither config.json (a model directory) nor checkpoints/ (a run)."
        + (f" It is a folder of runs; name one of them, such as {runs[0]}." if runs else "")
    )


def damaged_model(directory: Path) -> list[str]:
    """As `damaged_files`, for a model directory: its card is for people, who may edit it, and does not count.

    Where the checksums became others meanwhile, since another process recorded scores, all is compared again.
    """
    while True:
        before = _content(directory / CHECKSUMS)
        problems = [line for line in damaged_files(directory) if not line.startswith(f"{directory / CARD} ")]
        if not problems or _content(directory / CHECKSUMS) == before:
            return problems


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
