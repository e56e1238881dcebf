"""Prepares the data of steps in advance, in a thread, so that the loop does not wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_JOIN_SECONDS = 5.0


class Prefetch(Generic[T]):
    """Returns ``prepare(step)`` for one step after the other, computed up to `ahead` steps in advance.

    `prepare` must depend on nothing but the step. `take` raises an error of `prepare` unchanged, for the step in which
    it occurred. With `ahead` 0 there is no thread. Use it in a ``with`` block, whose end stops the thread.
    """

    def __init__(self, prepare: Callable[[int], T], ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"ahead must not be negative, got {ahead}")
        self._prepare, self._ahead = prepare, ahead
        self._worker: _Worker[T] | None = None

    def take(self, step: int) -> T:
        """Returns ``prepare(step)``; a step that does not follow the last one restarts the preparation."""
        if self._ahead == 0:
            return self._prepare(step)
        if self._worker is None or self._worker.next_step != step:
            self.close()
            self._worker = _Worker(self._prepare, step, self._ahead)
        return self._worker.take()

    def close(self) -> None:
        """Stops the thread after the step that it is preparing, and discards what it has prepared."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Worker(Generic[T]):
    """The thread that prepares the steps from `next_step` on."""

    def __init__(self, prepare: Callable[[int], T], next_step: int, ahead: int) -> None:
        self.next_step = next_step
        self._prepare, self._ahead = prepare, ahead
        self._ready: deque[T | _Failed] = deque()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(next_step,), name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready))  # the main thread handles signals meanwhile
            result = self._ready[0]
            if isinstance(result, _Failed):
                raise result.error  # it stays in the queue, so that the step fails again if it is repeated
            self._ready.popleft()
            self.next_step += 1
            self._changed.notify_all()
            return result

    def stop(self) -> None:
        with self._changed:
            self._stopped.set()
            self._ready.clear()
            self._changed.notify_all()
        # A read that hangs must not block the end of the run; the thread is a daemon and owns no resources.
        self._thread.join(timeout=_JOIN_SECONDS)

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped.is_set() or len(self._ready) < self._ahead)
                if self._stopped.is_set():
                    return
            try:
                result: T | _Failed = self._prepare(step)
            except BaseException as error:  # `take` raises any error in the loop's thread
                result = _Failed(error)
            with self._changed:
                if self._stopped.is_set():
                    return
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, _Failed):
                return
            step += 1
