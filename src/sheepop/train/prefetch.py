"""What steps need, prepared ahead of them on a thread of its own, so that the loop does not wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
_JOIN_SECONDS = 5.0


class Prefetch(Generic[T]):
    """Gives ``prepare(step)`` for one step after the other, made up to `ahead` steps before it is asked for.

    `prepare` must be a function of the step alone. An error in it comes out of `take` of the very step it belongs to,
    as it is. With `ahead` 0 there is no thread. Use it in a ``with`` block: whatever ends the block stops the thread.
    """

    def __init__(self, prepare: Callable[[int], T], ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"ahead must not be negative, got {ahead}")
        self._prepare, self._ahead = prepare, ahead
        self._worker: _Worker[T] | None = None

    def take(self, step: int) -> T:
        """What `step` needs.

        Any step may be asked for; one that does not follow the last begins the preparation anew.
        """
        if self._ahead == 0:
            return self._prepare(step)
        if self._worker is None or self._worker.next_step != step:
            self.close()
            self._worker = _Worker(self._prepare, step, self._ahead)
        return self._worker.take()

    def close(self) -> None:
        """Stops the thread after the step it is preparing, and forgets what is prepared."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Worker(Generic[T]):
    """The thread that prepares the steps from `next_step` on; a new one is made for another start."""

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
            self._changed.wait_for(lambda: bool(self._ready))  # signals are handled meanwhile
            result = self._ready[0]
            if isinstance(result, _Failed):
                raise result.error  # it stays: asked again, the step fails again
            self._ready.popleft()
            self.next_step += 1
            self._changed.notify_all()
            return result

    def stop(self) -> None:
        with self._changed:
            self._stopped.set()
            self._ready.clear()
            self._changed.notify_all()
        # A read that hangs must not hang the end of the run; the thread is a daemon and holds nothing.
        self._thread.join(timeout=_JOIN_SECONDS)

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped.is_set() or len(self._ready) < self._ahead)
                if self._stopped.is_set():
                    return
            try:
                result: T | _Failed = self._prepare(step)
            except BaseException as error:  # whatever it is, the loop must hear of it
                result = _Failed(error)
            with self._changed:
                if self._stopped.is_set():
                    return
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, _Failed):
                return
            step += 1
