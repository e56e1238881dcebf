"""Writes that go on beside the training loop, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """One thread that runs one job at a time; what a job raises, the next call on this object raises.

    A job must own everything it reads: the loop changes the weights meanwhile.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the job before, then starts this one."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Raises what the last job raised, if it has ended by now."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Waits for the last job, whose error is left to `wait`, and ends the thread."""
        self._thread.shutdown()
