"""The directory of a training run: configuration, metrics, samples, and checkpoints that are whole or absent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import (
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
from sheepop.core.locks import exclusive_lock

CONFIG = "config.yaml"
REPLACED = ".replaced"
MOVING = ".replaced-moving"
LOCK = ".lock"
# Everything that a run consists of; what else lies in its directory is somebody's own.
RUN_ENTRIES = frozenset(
    {
        CONFIG,
        "environment.json",
        "metrics.jsonl",
        "samples.jsonl",
        "report.html",
        "plots",
        "tensorboard",
        "difficulty.safetensors",
        "wandb",
        "profile",
        "corpus",
        ".corpus.building",
        "checkpoints",
        REPLACED,
        MOVING,
        LOCK,
    }
)
_POINTERS = frozenset({"latest", "best"})
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunDirectory:
    """Paths and checkpoints of one run."""

    path: Path

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
            run._require_place(overwrite, reading)
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
        remove_tree(run._replaced)

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
        with exclusive_lock(self.path / LOCK, refusal) as held:
            try:
                yield held
            finally:
                # Under the lock: what another process begins here a moment later is not removed with it.
                if not existed and not self._entries():
                    remove_tree(self.path)

    def _entries(self) -> list[Path]:
        """What is in the directory, if it is there, beside the lock."""
        return [entry for entry in self.path.iterdir() if entry.name != LOCK] if self.path.is_dir() else []

    def _require_empty_or_run(self) -> None:
        if self._entries() and not self.holds_run():
            raise UsageError(
                f"The output directory {self.path} is not empty and does not hold a run. Choose another one."
            )

    def _require_place(self, overwrite: bool, reading: Sequence[Path]) -> None:
        self._require_empty_or_run()
        if not self._entries():
            return
        if not overwrite:
            raise UsageError(
                f"The output directory {self.path} already holds a run. Go on with it (--resume auto), "
                "replace it (--overwrite), or choose another one."
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
                f"The new run is to be made from {needed[0]}, which is part of the run in {self.path} that it would "
                "replace. Choose another output directory."
            )

    def _set_aside(self) -> None:
        """Moves what is here into a folder of its own, after putting back what a killed start had moved there."""
        self._move_back()
        if self._replaced.is_dir() and not self.config_file.is_file():
            self._put_back()
        remove_tree(self._replaced)
        entries = self._entries()
        if not entries:
            return
        self._moving.mkdir()
        try:
            # The configuration first, and last on the way back: no run without all of its parts looks like one.
            for entry in sorted(entries, key=lambda entry: entry.name != CONFIG):
                entry.rename(self._moving / entry.name)
            self._moving.rename(self._replaced)
        except BaseException:
            self._move_back()
            raise

    def _put_back(self) -> None:
        """Removes what a failed start left, then brings back the run that it was to replace."""
        for entry in self._entries():
            if entry != self._replaced:
                remove_tree(entry)
        if self._replaced.is_dir():
            self._replaced.rename(self._moving)
            self._move_back()

    def _move_back(self) -> None:
        """Brings back what is on its way; beside it lies only what came back, or had not left, before a kill."""
        if self._moving.is_dir():
            for entry in sorted(self._moving.iterdir(), key=lambda entry: entry.name == CONFIG):
                entry.rename(self.path / entry.name)
            self._moving.rmdir()

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """A directory that holds a run already; raises `CheckpointError` otherwise."""
        run = cls(Path(path))
        if not run.holds_run():
            raise CheckpointError(f"{run.path} does not hold a run: {run.path / CONFIG} is missing.")
        return run

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file() or self.checkpoints.is_dir() or self.is_being_replaced()

    def is_being_replaced(self) -> bool:
        """Whether a new run has begun to take the place of this one, and was killed before it had."""
        return self._replaced.is_dir() or self._moving.is_dir()

    @property
    def _replaced(self) -> Path:
        """Where a run waits that a new one is about to replace."""
        return self.path / REPLACED

    @property
    def _moving(self) -> Path:
        """Where that run is while its parts are moved there or back."""
        return self.path / MOVING

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: the one source of truth about the run's course."""
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        """Text written by the model while it was trained, one JSON object a line."""
        return self.path / "samples.jsonl"

    @property
    def plots(self) -> Path:
        """Pictures of the metrics."""
        return self.path / "plots"

    @property
    def corpus(self) -> Path:
        """The corpus, when the run built its own."""
        return self.path / "corpus"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints and of the pointers to the latest and best."""
        return self.path / "checkpoints"

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
            problems = damaged_files(self.checkpoint(step))
            if not problems:
                return step
            warn(f"Checkpoint {self.checkpoint(step)} is passed over: {'; '.join(problems)}.")
        return None

    def remove_leftovers(self) -> None:
        """Removes what a killed process left half written or replaced, and puts back what it had moved; under the lock.

        For a run that has begun.
        """
        self._move_back()
        remove_tree(self._replaced)
        for directory in (self.path, self.plots, self.checkpoints):
            remove_partial(directory)

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Removes checkpoints up to step `newest` except the last `keep_last`, milestones, and the one marked best."""
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
    raise CheckpointError(
        f"{path} is not a model: it holds neither config.json (a model directory) nor checkpoints/ (a run)."
    )
