"""Engines that run a pass in this process, in processes on this machine, or on a Ray cluster.

A pass is one task for each part. Task `rank` writes its own directory atomically, so a stopped pass resumes with the
parts whose directory is missing or damaged. Tasks, and so the result, do not depend on the engine or the number of
workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sheepop.core.cluster import ray_cluster
from sheepop.core.console import Console
from sheepop.core.errors import DataError, SheepOpError, StorageError
from sheepop.core.files import atomic_directory, damaged_files, remove_partial, write_atomic
from sheepop.data.pipeline.parts import part_path

Work = Callable[[int, Path], None]
"""The work of a pass: fills the directory of part `rank`. It is pickled for workers."""
_MEGABYTES_PER_PROCESS, _MARK = 8, "mark"


class LocalEngine:
    """Runs tasks here, or with 2 workers or more in spawned processes; a script then needs the ``__main__`` guard."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._wanted: Connection | None = None  # the worker processes exit when it closes

    def execute(self, task: Callable[[int], int], ranks: Sequence[int]) -> Iterator[int]:
        """Runs the task of every rank and yields the ranks in order; raises `DataError` if a worker dies."""
        if self.num_workers < 2:
            yield from map(task, ranks)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            theirs, self._wanted = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self.num_workers, context, _prepare_worker, (theirs,))
        try:
            # Ctrl-C reaches the whole process group; only the parent handles it, also while the workers start.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                # The pool's `map` would cancel the remaining tasks, which fails on a pool that is shut down.
                results = deque([self._pool.submit(task, rank) for rank in ranks])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            while results:
                yield results.popleft().result()
        except BrokenProcessPool:
            self.release()
            raise DataError(
                "A worker process ended abruptly, most likely because memory ran out. Lower data.num_workers or "
                "data.max_file_bytes and run the command again."
            ) from None
        except BaseException as end:
            # If a task fails, running tasks are finished, which saves their work. An interrupt must not wait for tasks
            # that may take minutes, so it ends the workers.
            if self._wanted is not None and not isinstance(end, Exception):
                self._wanted.close()
            self.release()
            raise

    def release(self) -> None:
        """Ends the processes after their current tasks; drops tasks that have not begun."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if self._wanted is not None:
            self._wanted.close()


def _prepare_worker(wanted: Connection) -> None:
    # Each worker uses one thread; the tokenizer library would start one per core in every worker.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_when_unwanted() -> None:
        """Exits when the parent closes its end of `wanted` or dies, which closes it too."""
        wait([wanted])
        os._exit(1)

    threading.Thread(target=end_when_unwanted, daemon=True).start()


class RayEngine:
    """Runs tasks on the Ray cluster that was started with ``ray start``, or on a local one if there is none.

    Every node needs SheepOp and the input and output at the same paths. `num_workers` bounds concurrent tasks; 0 leaves
    that to the cluster.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers

    def execute(self, task: Callable[[int], int], ranks: Sequence[int]) -> Iterator[int]:
        """Runs the task of every rank and yields the ranks as they finish; Ray repeats the tasks of a lost node."""
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
        """Does nothing: the cluster belongs to whoever started it."""


Engine = LocalEngine | RayEngine


def _done(task: Callable[[int], int], rank: int) -> int:
    return task(rank)


def _result(finished: Any) -> int:
    """The rank of a finished task on the cluster; raises the error of a task that failed."""
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


def make_part(directory: Path, mark: str, work: Work, rank: int) -> int:
    """Does the work of part `rank`, writing its directory atomically; returns the rank.

    Raises `StorageError` if the pass is gone or has another mark: its build was killed, and a worker of a cluster may
    live on for some seconds, in which another build begins at the same place.
    """
    with atomic_directory(part_path(directory, rank), replace=True, parents=False) as staging:
        work(rank, staging)
        if mark != _mark(directory):
            raise StorageError(f"Cannot write {directory}: another build has begun there.")
    return rank


def _mark(directory: Path) -> str:
    """What tells the pass in `directory` from a later one in a directory of the same name; it is drawn once."""
    file = directory / _MARK
    if not file.is_file():
        write_atomic(file, uuid.uuid4().hex)
    return file.read_text(encoding="ascii")


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
    """Does the work of every part, with `sizes` in megabytes for the progress bar, unless its directory is complete.

    Light work on a few megabytes runs in this process, because starting others would take longer. Raises the error of
    a task that failed; finished parts stay and are not done again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    todo = [rank for rank in range(len(sizes)) if damaged_files(part_path(directory, rank))]
    megabytes = sum(sizes[rank] for rank in todo)
    task, processes = partial(make_part, directory, _mark(directory), work), megabytes / _MEGABYTES_PER_PROCESS
    with console.progress(description, sum(sizes), "MB") as progress:
        if len(todo) < len(sizes):
            progress.advance(sum(sizes) - megabytes)
        is_for_one = len(todo) < 2 or (is_light and round(processes) < 2)
        for rank in map(task, todo) if is_for_one else engine.execute(task, todo):
            progress.advance(sizes[rank])
