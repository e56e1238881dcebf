"""Work spread over processes with its results in the order of the input, and never more than a few in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from sheepop.core.errors import DataError

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Up to `num_workers` processes, started with the first work and kept for the next until `release`."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._wanted: Connection | None = None  # the processes live as long as it is open

    def ordered_map(self, function: Callable[[T], R], tasks: Iterable[T]) -> Generator[R, None, None]:
        """As the function `ordered_map`, with these workers; whatever ends it early ends them too."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            theirs, self._wanted = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.num_workers, mp_context=context, initializer=_prepare_worker, initargs=(theirs,)
            )
        pending: deque[Future[R]] = deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(function, task))
                if len(pending) > 2 * self.num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            self.release()
            raise DataError(
                "A worker process ended abruptly, most likely because memory ran out. Lower data.num_workers or "
                "data.max_file_bytes and run the command again."
            ) from None
        except BaseException as end:
            # When a task fails the others under way are finished, which saves their work. An interrupt must not wait
            # for work that may take minutes, and nobody takes the results any more.
            if self._wanted is not None and not isinstance(end, Exception):
                self._wanted.close()
            self.release()
            raise

    def release(self) -> None:
        """Ends the processes after what they are doing; work that has not begun is dropped."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if self._wanted is not None:
            self._wanted.close()


def ordered_map(function: Callable[[T], R], tasks: Iterable[T], *, num_workers: int) -> Generator[R, None, None]:
    """``function(task)`` for every task, in the order of `tasks`; with `num_workers` 0 in this process.

    `function`, tasks and results are pickled to and from freshly started (spawned) processes, so a script that
    uses workers needs the guard ``if __name__ == "__main__":``. At most ``2 * num_workers + 1`` tasks are pending,
    so memory does not grow with their number. Raises `DataError` when a worker dies.
    """
    if num_workers == 0:
        yield from map(function, tasks)
        return
    workers = Workers(num_workers)
    try:
        yield from workers.ordered_map(function, tasks)
    finally:
        workers.release()


def _prepare_worker(wanted: Connection) -> None:
    # Ctrl-C reaches the whole process group; only the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker is one thread of work: the tokenizer library would start one per core in every worker.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_when_unwanted, args=(wanted,), daemon=True).start()


def _end_when_unwanted(wanted: Connection) -> None:
    """Ends this process when the other end of `wanted` is closed, which a killed parent cannot ask for otherwise."""
    wait([wanted])
    os._exit(1)
