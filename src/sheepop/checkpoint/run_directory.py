"""The directory of a training run: file names, lock, atomic checkpoints and their retention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import (
    CHECKSUMS,
    TEMPORARY_MARK,
    atomic_directory,
    damaged_files,
    is_left_behind,
    make_directory,
    read_json,
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
    """A descriptor for a file or folder of a run: gives its path in a `RunDirectory`."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name, self.__doc__ = name, meaning

    def __get__(self, run: RunDirectory, owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run: the paths of its files, its lock, and its checkpoints."""

    path: Path

    config_file = _Entry("config.yaml", "The resolved configuration.")
    record_file = _Entry(
        "environment.json", "The environment in which the run was started: machine, versions, command."
    )
    metrics_file = _Entry(
        "metrics.jsonl", "The metrics, one JSON object per line; reports and plots are made from this file alone."
    )
    samples_file = _Entry("samples.jsonl", "Texts that the model generated during training, one JSON object per line.")
    report = _Entry("report.html", "The report of the run, for a browser.")
    plan = _Entry("plan.html", "The plan of the run, if `sheepop plan` wrote it here, also before the run starts.")
    advice = _Entry("advice.json", "The advice that the run tries, and the held-out losses with and without it.")
    plots = _Entry("plots", "Plots of the metrics.")
    profile = _Entry("profile", "Profiles of single steps.")
    stacks = _Entry("stacks", "Stack traces of all ranks, written when a step took too long.")
    traces = _Entry("traces", "Traces of a prompt through the network, at several steps.")
    tensorboard = _Entry("tensorboard", "The metrics for TensorBoard.")
    wandb = _Entry("wandb", "The metrics for Weights & Biases.")
    corpus = _Entry("corpus", "The corpus, if the run built its own.")
    corpus_in_work = _Entry(".corpus.building", "That corpus, while it is being built.")
    base = _Entry("base", "The base model of a run that trains a LoRA adapter.")
    examples = _Entry("examples", "The tokenised examples of post-training.")
    difficulty = _Entry(
        "difficulty.safetensors", "The difficulty of each row of the corpus, for runs that begin with easy rows."
    )
    checkpoints = _Entry("checkpoints", "The directory of checkpoints and of the pointers to the latest and best one.")
    lock = _Entry(".lock", "The lock file of the process that works on the run.")
    replaced = _Entry(".replaced", "The old run, while a new one that replaces it is starting.")
    moving = _Entry(".replaced-moving", "The old run, while its files are being moved to or from `replaced`.")

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunDirectory:
        """Prepares a directory for a new run.

        Refuses a directory that contains a run, unless `overwrite`. Always refuses one that contains foreign files, so
        that a mistyped path cannot delete them.
        """
        with cls.starting(path, overwrite=overwrite) as run:
            return run

    @classmethod
    @contextmanager
    def starting(
        cls, path: str | Path, *, overwrite: bool = False, reading: Sequence[Path] = ()
    ) -> Iterator[RunDirectory]:
        """Creates a run like `create`; if the block fails, restores the directory, including an old run.

        `reading` are the paths that the new run reads; none of them may be part of the run that it replaces.
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
        """Locks the run for this process; yields false if the file system has no locks.

        Raises `CheckpointError` if another process has the lock, and `UsageError` if the directory is not a run.
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
                # Under the lock, so that files of a run that another process starts next are not removed.
                if not existed and not self._entries():
                    remove_tree(self.path)

    def is_running(self) -> bool:
        """Whether a process is working on this run."""
        return is_locked(self.lock)

    def _entries(self) -> list[Path]:
        """Returns the entries of the directory, if it exists, except the lock and what a plan wrote before the run."""
        kept = (self.lock, self.plan)
        return [entry for entry in self.path.iterdir() if entry not in kept] if self.path.is_dir() else []

    def _require_empty_or_run(self) -> None:
        if self._entries() and not self.holds_run():
            raise UsageError(f"The output directory {self.path} is not empty and is not a run. Choose another one.")

    def require_place(self, overwrite: bool, reading: Sequence[Path] = ()) -> None:
        """Raises `UsageError` if `starting` would refuse to create a run."""
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
                f"The output directory {self.path} is not replaced, because {link} is a link, whose target would be "
                "left behind. Remove the run yourself, or choose another directory."
            )
        place = self.path.resolve()
        if needed := [path for path in reading if place in (path.resolve(), *path.resolve().parents)]:
            raise UsageError(
                f"The new run would read {needed[0]}, which is part of the run in {self.path} that it would replace. "
                "Choose another output directory."
            )

    def _set_aside(self) -> None:
        """Moves the run to `replaced`, after restoring a run that a killed start had moved there."""
        self._move_back()
        if self.replaced.is_dir() and not self.config_file.is_file():
            self._put_back()
        remove_tree(self.replaced)
        entries = self._entries()
        if not entries:
            return
        self.moving.mkdir()
        try:
            # The configuration is moved first, and restored last, so that an incomplete run never looks like a run.
            for entry in sorted(entries, key=lambda entry: entry != self.config_file):
                entry.rename(self.moving / entry.name)
            self.moving.rename(self.replaced)
        except BaseException:
            self._move_back()
            raise

    def _put_back(self) -> None:
        """Removes the files of a failed start, then restores the old run."""
        for entry in self._entries():
            if entry != self.replaced:
                remove_tree(entry)
        if self.replaced.is_dir():
            self.replaced.rename(self.moving)
            self._move_back()

    def _move_back(self) -> None:
        """Moves the files in `moving` back; the directory itself only has files of the same run, from before a kill."""
        if self.moving.is_dir():
            for entry in sorted(self.moving.iterdir(), key=lambda entry: entry.name == self.config_file.name):
                entry.rename(self.path / entry.name)
            self.moving.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Opens an existing run; raises `CheckpointError` if there is none."""
        run = cls(Path(path))
        if not run.holds_run():
            raise CheckpointError(f"{run.path} is not a run: {run.config_file} is missing.")
        return run

    def holds_run(self) -> bool:
        """Whether the directory contains a run."""
        return self.config_file.is_file() or self.checkpoints.is_dir() or self.is_being_replaced()

    def has_started(self) -> bool:
        """Whether a run was started here: an interrupted preparation is not a run yet."""
        return self.config_file.is_file() or (bool(self.steps()) and not self.is_being_replaced())

    def has_checkpoint(self) -> bool:
        """Whether the run has a checkpoint to load."""
        return any(self.pointer(name) is not None for name in _POINTERS)

    def is_being_replaced(self) -> bool:
        """Whether a new run was killed while it was replacing this one."""
        return self.replaced.is_dir() or self.moving.is_dir()

    def checkpoint(self, step: int) -> Path:
        """Returns the directory of the checkpoint of `step`."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint directory, in ascending order."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP_NAME.fullmatch(entry.name) for entry in self.checkpoints.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    @contextmanager
    def write_checkpoint(self, step: int) -> Iterator[Path]:
        """Yields a directory to fill, which becomes the latest checkpoint when it is complete and durable."""
        remove_partial(self.checkpoints)
        with atomic_directory(self.checkpoint(step), replace=True) as directory:
            yield directory
        self._point("latest", step)

    def mark_latest(self, step: int) -> None:
        """Points ``latest`` at a finished checkpoint, if a kill or damage left it at another."""
        if self.pointer("latest") != step:
            self._point("latest", step)

    def mark_best(self, step: int) -> None:
        """Points ``best`` at a finished checkpoint."""
        self._point("best", step)

    def forget_best(self) -> None:
        """Removes the ``best`` pointer, so that loading the run loads its latest checkpoint."""
        with storage_errors(self.checkpoints):
            (self.checkpoints / "best").unlink(missing_ok=True)

    def pointer(self, name: str) -> int | None:
        """Returns the step that ``latest`` or ``best`` names, or None if it is missing or names no checkpoint."""
        try:
            match = _STEP_NAME.fullmatch((self.checkpoints / name).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return None
        step = int(match[1]) if match else None
        return step if step is not None and self.checkpoint(step).is_dir() else None

    def latest_good(self, warn: Callable[[str], None], *, before: int | None = None) -> int | None:
        """Returns the newest step (below `before`, if given) with an undamaged checkpoint.

        Calls `warn` for each damaged checkpoint that it skips.
        """
        for step in reversed([step for step in self.steps() if before is None or step < before]):
            problems = damaged_model(self.checkpoint(step))
            if not problems:
                return step
            warn(f"Checkpoint {self.checkpoint(step)} is skipped: {'; '.join(problems)}.")
        return None

    def remove_leftovers(self) -> None:
        """Removes partial and replaced files of a killed process, and restores files that it had moved.

        Needs the lock, and a run that has started.
        """
        self._move_back()
        remove_tree(self.replaced)
        for directory in (self.path, self.plots, self.checkpoints):
            remove_partial(directory)

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Removes the checkpoints up to step `newest`, except the last `keep_last`, milestones, best and latest."""
        steps = [step for step in self.steps() if step <= newest]
        kept = milestones | {self.pointer("best"), self.pointer("latest")} | set(steps[-keep_last:])
        self._remove(step for step in steps if step not in kept)

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of all later steps, for example after a rewind."""
        self._remove(later for later in self.steps() if later > step)

    def _remove(self, steps: Iterable[int]) -> None:
        """Removes checkpoints; each is renamed first, so that a kill never leaves a partly deleted checkpoint."""
        for step in steps:
            if self.checkpoint(step).is_dir():
                doomed = self.checkpoint(step).with_name(f".{self.checkpoint(step).name}{TEMPORARY_MARK}pruned")
                self.checkpoint(step).rename(doomed)
                remove_tree(doomed)

    def _foreign_entry(self) -> Path | None:
        """Returns an entry of this directory, or of its checkpoints, that SheepOp did not write, or None."""
        entries = [entry for entry in self.path.iterdir() if entry.name not in RUN_ENTRIES]
        if self.checkpoints.is_dir():
            found = (entry for entry in self.checkpoints.iterdir() if entry.name not in _POINTERS)
            entries += [entry for entry in found if not _STEP_NAME.fullmatch(entry.name)]
        foreign = (entry for entry in entries if not is_left_behind(entry.name) and entry.name != ".DS_Store")
        return min(foreign, default=None)

    def _point(self, name: str, step: int) -> None:
        write_atomic(self.checkpoints / name, self.checkpoint(step).name + "\n")


# Any other entry of a run's directory belongs to the user.
RUN_ENTRIES = frozenset(entry.name for entry in vars(RunDirectory).values() if isinstance(entry, _Entry))


def damaged_model(directory: Path) -> list[str]:
    """Returns the problems that `damaged_files` finds in a model directory, except for its card, which users may edit.

    Large files that were verified before and have not changed since are not read again. Compares again if the checksums
    changed meanwhile, because another process recorded scores.
    """
    from sheepop.core.verified_files import remembered_sha256  # loads pydantic, which help does not need

    while True:
        before = _content(directory / CHECKSUMS)
        found = damaged_files(directory, remembered_sha256)
        problems = [line for line in found if not line.startswith(f"{directory / CARD} ")]
        if not problems or _content(directory / CHECKSUMS) == before:
            return problems


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


FORMAT_VERSION = 2
STATE = "state"
COUNTERS = "state.json"


def read_counters(checkpoint: Path) -> dict[str, Any]:
    """Reads only the counters of `checkpoint`; raises `CheckpointError` if there are none."""
    return read_state_record(checkpoint)["counters"]


def read_state_record(checkpoint: Path) -> dict[str, Any]:
    """Reads counters and optimizer scalars; raises `CheckpointError` for an unknown format."""
    folder = checkpoint / STATE
    record = read_json(folder / COUNTERS)
    version = record.get("format_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or not {"counters", "optimizer_scalars"} <= record.keys():
        raise CheckpointError(f"{folder / COUNTERS} is not a training state.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has training-state version {version}; this SheepOp reads up to "
            f"{FORMAT_VERSION}. Install a newer SheepOp."
        )
    return record
