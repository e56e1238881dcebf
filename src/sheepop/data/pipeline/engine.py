"""Who does the work of a pass: this process, processes of this machine, or a Ray cluster.

A pass is one piece of work for each of its parts. Part `rank` leaves a directory of its own, whole or absent, so a pass
that was stopped goes on with the parts whose directory is missing or damaged. Work depends on the input and never on
the engine or the number of workers, and so does the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.core.cluster import ray_cluster
from sheepop.core.console import Console
from sheepop.core.errors import DataError, SheepOpError
from sheepop.core.files import atomic_directory, damaged_files, remove_partial
from sheepop.data.pipeline.parts import part_path
from sheepop.data.workers import Workers

Work = Callable[[int, Path], None]
"""Fills the directory of part `rank`; it is sent to workers."""
_MEGABYTES_PER_PROCESS = 8


@dataclass(frozen=True)
class Task:
    """Does the work of a part, whose directory is whole or absent."""

    directory: Path
    work: Work

    def __call__(self, rank: int) -> int:
        """The rank itself."""
        with atomic_directory(part_path(self.directory, rank), replace=True) as staging:
            self.work(rank, staging)
        return rank


class Engine(ABC):
    """Does tasks, at most `num_workers` at a time."""

    num_workers: int

    @abstractmethod
    def execute(self, task: Task, ranks: Sequence[int], useful: int) -> Iterator[int]:
        """Does the task of every rank and yields those that are done; the first error ends all.

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

    def execute(self, task: Task, ranks: Sequence[int], useful: int) -> Iterator[int]:
        """The ranks in their order."""
        if min(self.num_workers, useful) < 2:
            yield from map(task, ranks)
            return
        with closing(self._workers.ordered_map(task, ranks)) as done:
            yield from done

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

    def execute(self, task: Task, ranks: Sequence[int], useful: int) -> Iterator[int]:
        """The ranks as they are done; those of a node that is lost are done again on another.

        Work for a single process is done here: it would be over before the cluster had started one.
        """
        if useful < 2:
            yield from map(task, ranks)
            return
        with ray_cluster(DataError):
            import ray

            remote, shared = ray.remote(_done), ray.put(task)
            waiting, running = deque(ranks), list[Any]()
            try:
                while waiting or running:
                    while waiting and len(running) < (self.num_workers or len(ranks)):
                        running.append(remote.remote(shared, waiting.popleft()))
                    (finished, *_), running = ray.wait(running)
                    yield _result(finished)
            finally:
                for each in running:
                    ray.cancel(each)

    def release(self) -> None:
        """Nothing is kept: the cluster belongs to whoever started it."""


def _done(task: Task, rank: int) -> int:
    return task(rank)


def _result(finished: Any) -> int:
    """The rank of a task that has ended on the cluster; raises the error of the task itself."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return int(ray.get(finished))
    except RayTaskError as error:
        if isinstance(error.cause, SheepOpError):
            raise error.cause from None
        raise RuntimeError(f"A task of the build failed.\n{error}") from None
    except RayError:
        raise SheepOpError(
            "A task of the build did not finish, most likely because the machines it ran on were lost. Run the same "
            "command again: it does only what is missing."
        ) from None


def run_pass(
    engine: Engine,
    directory: Path,
    work: Work,
    sizes: Sequence[float],
    console: Console,
    description: str,
    *,
    is_light: bool = False,
) -> None:
    """Does the work of every entry of `sizes` (megabytes, for the progress shown), unless its directory is whole.

    Light work of a few megabytes is done before more processes have started, so it does not ask for them.

    Raises the error that stopped a task; what is done stays and need not be done again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    todo = [rank for rank in range(len(sizes)) if not _is_whole(part_path(directory, rank))]
    megabytes = sum(sizes[rank] for rank in todo)
    with console.progress(description, sum(sizes), "MB") as progress:
        if len(todo) < len(sizes):
            progress.advance(sum(sizes) - megabytes)
        if todo:
            useful = len(todo) if not is_light else round(megabytes / _MEGABYTES_PER_PROCESS)
            for rank in engine.execute(Task(directory, work), todo, useful):
                progress.advance(sizes[rank])


def _is_whole(path: Path) -> bool:
    return path.is_dir() and not damaged_files(path)
