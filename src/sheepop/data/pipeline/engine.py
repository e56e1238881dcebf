"""Who runs the tasks of a pass: this machine's processes, or a Ray cluster, through datatrove's executors.

A pass is a list of steps and a number of tasks; task `rank` leaves a directory of its own, whole or absent, so a
pass that was stopped goes on with the tasks whose directory is missing or damaged. Tasks depend on the input and
never on the engine or the number of workers, and so does the result.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from sheepop.core import errors
from sheepop.core.cluster import ray_cluster
from sheepop.core.console import Console
from sheepop.core.errors import DataError, SheepOpError
from sheepop.core.files import damaged_files, read_json, remove_partial, remove_tree, write_json
from sheepop.data.pipeline.parts import part_path
from sheepop.data.pipeline.writer import FAILURES
from sheepop.data.workers import Workers

_POLL_SECONDS = 0.5
_MEGABYTES_PER_PROCESS = 8
OnDone = Callable[[int], None]


class Engine(ABC):
    """Runs the tasks of a pass that are not done yet, at most `num_workers` at a time."""

    num_workers: int

    @abstractmethod
    def execute(self, steps: list[PipelineStep], tasks: int, log: Path, on_done: OnDone, useful: int) -> None:
        """Runs every task without a completion mark in `log`; calls `on_done` with each one that is done.

        More than `useful` processes would not be faster.
        """

    @abstractmethod
    def release(self) -> None:
        """Ends processes that are kept for the next pass."""


class LocalEngine(Engine):
    """This machine: in this process with 0 workers, else in that many processes, which serve all passes."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self._workers = Workers(num_workers)

    def execute(self, steps: list[PipelineStep], tasks: int, log: Path, on_done: OnDone, useful: int) -> None:
        """Runs the tasks side by side; the first error ends them all."""
        workers = self._workers if min(self.num_workers, useful) > 1 else None
        _LocalExecutor(steps, tasks, log, workers, on_done).run()

    def release(self) -> None:
        """Ends the worker processes."""
        self._workers.release()


class RayEngine(Engine):
    """The Ray cluster that was started with ``ray start``, or one of this machine's own when there is none.

    Every node needs SheepOp installed and the input and output at the same paths. `num_workers` bounds the tasks
    at a time; 0 leaves that to the cluster.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers

    def execute(self, steps: list[PipelineStep], tasks: int, log: Path, on_done: OnDone, useful: int) -> None:
        """Runs the tasks on the cluster; those of a node that is lost are run again on another.

        Work for a single process is done here: it would be over before the cluster had started one.
        """
        if useful < 2:
            _LocalExecutor(steps, tasks, log, None, on_done).run()
            return
        with ray_cluster(DataError):
            from datatrove.executor.ray import RayPipelineExecutor

            _add_missing_statistics(log)

            executor = RayPipelineExecutor(
                steps, tasks=tasks, workers=self.num_workers or -1, logging_dir=str(log), mem_per_cpu_gb=0
            )
            with _watching(executor, on_done):
                executor.run()

    def release(self) -> None:
        """Nothing is kept: the cluster belongs to whoever started it."""


class _LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor on workers that end with their parent, also when it is killed; None: this process."""

    def __init__(
        self, steps: list[PipelineStep], tasks: int, log: Path, workers: Workers | None, on_done: OnDone
    ) -> None:
        super().__init__(steps, tasks=tasks, workers=workers.num_workers if workers else 1, logging_dir=str(log))
        self._log, self._workers, self._on_done = log, workers, on_done

    def run(self) -> None:
        """Runs the tasks that have no completion mark, in their order."""
        task = _Task(self.pipeline, self.tasks, self._log)
        ranks = self.get_incomplete_ranks(range(self.tasks))
        if self._workers is None:
            for rank in ranks:
                self._on_done(task(rank))
            return
        with closing(self._workers.ordered_map(task, ranks)) as done:
            for rank in done:
                self._on_done(rank)


class _Task:
    """One task of a local pass, as a function that a worker process can run."""

    def __init__(self, steps: list[PipelineStep], tasks: int, log: Path) -> None:
        self._steps, self._tasks, self._log = steps, tasks, log

    def __call__(self, rank: int) -> int:
        # As the executor does, without the four log sinks that it opens for every task, 10 ms each.
        data = None
        for step in deepcopy(self._steps):
            data = step(data, rank, self._tasks)
        deque(data or (), maxlen=0)
        (self._log / "completions" / f"{rank:05d}").touch()
        return rank


def run_pass(
    engine: Engine,
    directory: Path,
    steps: list[PipelineStep],
    sizes: Sequence[float],
    console: Console,
    description: str,
    *,
    is_light: bool = False,
) -> None:
    """Runs one task for every entry of `sizes` (megabytes, for the progress shown), unless its directory is whole.

    Light work of a few megabytes is done before more processes have started, so it does not ask for them.

    Raises the error that stopped a task; what is done stays and need not be done again.
    """
    log = directory / "log"
    completions = log / "completions"
    completions.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    remove_tree(directory / FAILURES)
    done = {rank for rank in range(len(sizes)) if _is_whole(part_path(directory, rank))}
    for rank in range(len(sizes)):
        mark = completions / f"{rank:05d}"
        if rank in done:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
    with console.progress(description, sum(sizes), "MB") as progress:
        if done:
            progress.advance(sum(sizes[rank] for rank in done))
        if len(done) < len(sizes):
            todo = [rank for rank in range(len(sizes)) if rank not in done]
            useful = len(todo) if not is_light else round(sum(sizes[rank] for rank in todo) / _MEGABYTES_PER_PROCESS)
            engine.execute(steps, len(sizes), log, lambda rank: progress.advance(sizes[rank]), useful)
    missing = [rank for rank in range(len(sizes)) if not part_path(directory, rank).is_dir()]
    if missing:
        raise _failure(directory, missing)


def _is_whole(path: Path) -> bool:
    return path.is_dir() and not damaged_files(path)


def _failure(directory: Path, missing: list[int]) -> Exception:
    """The error that a task wrote down where nobody saw it."""
    for rank in missing:
        path = directory / FAILURES / f"{rank:05d}.json"
        if path.is_file():
            record = read_json(path, DataError)
            kind = getattr(errors, record["type"], None) if record["type"] else None
            if isinstance(kind, type) and issubclass(kind, SheepOpError):
                return kind(record["message"])
            return RuntimeError(f"A task of the build failed.\n{record['traceback']}")
    return SheepOpError(
        f"{len(missing)} of the build's tasks did not finish, most likely because the machines they ran on were "
        "lost. Run the same command again: it does only what is missing."
    )


def _add_missing_statistics(log: Path) -> None:
    """Gives tasks that are done empty ones: the executor adds up all, and a node may be lost before it wrote any."""
    (log / "stats").mkdir(exist_ok=True)
    for mark in (log / "completions").iterdir():
        file = log / "stats" / f"{mark.name}.json"
        if not file.exists():
            write_json(file, [])


@contextmanager
def _watching(executor: PipelineExecutor, on_done: OnDone) -> Iterator[None]:
    """Reports tasks as their completion marks appear, whoever writes them."""
    todo, ended = set(executor.get_incomplete_ranks()), threading.Event()

    def report() -> None:
        still = set(executor.get_incomplete_ranks(sorted(todo)))
        for rank in sorted(todo - still):
            on_done(rank)
        todo.intersection_update(still)

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            report()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        report()
