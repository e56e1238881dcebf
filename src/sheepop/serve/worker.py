"""The threads of a server: one for each engine, and some for slow work beside it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from sheepop.adapt.row_adapters import Adapter
from sheepop.core.errors import RanksError, SheepOpError
from sheepop.generate.engine import Engine
from sheepop.generate.request import Request
from sheepop.generate.updates import Update
from sheepop.serve.protocol import ApiError

T = TypeVar("T")
_LOG = logging.getLogger("sheepop.server")


class EngineFaultError(SheepOpError):
    """The engine failed for a reason that is not the fault of the request."""


class ShutdownError(SheepOpError):
    """The engine ended before the request did."""


class EngineDeadError(EngineFaultError):
    """The thread of the engine has ended by a fault, so the model answers nothing until it is loaded again."""


class DeadlineError(SheepOpError):
    """The request did not end in time."""


@dataclass(frozen=True)
class _Event:
    """The updates of a request after a step, or the error that ended it; `is_over` marks the last event."""

    updates: list[Update]
    is_over: bool = False
    error: SheepOpError | None = None


@dataclass(frozen=True)
class _Listener:
    """A task that waits for requests: its event loop, and the queue of their events."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[_Event]


class EngineWorker:
    """Runs an engine for many tasks at a time. A request that fails does not affect the others."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self.scheduler, self._name = engine, engine.scheduler, name
        self._inbox: deque[tuple[Callable[[Sequence[Request], _Listener], None], Sequence[Request], _Listener]] = (
            deque()
        )
        self._wake = threading.Condition()
        self._listeners: dict[Request, _Listener] = {}
        self._stopping = False
        # Why no request is taken any more, once the thread has ended.
        self._end: SheepOpError | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> EngineDeadError | None:
        """Why the thread has ended, if it was a fault."""
        return self._end if isinstance(self._end, EngineDeadError) else None

    def require(self, adapter: Adapter) -> None:
        """Raises `UsageError` if requests with this adapter cannot run."""
        self._engine.require(adapter)

    async def write(
        self, requests: Sequence[Request], *, seconds: float | None = None
    ) -> AsyncGenerator[list[Update], None]:
        """Yields an empty list when the engine accepts the requests, then the updates of each step, to the end.

        Raises `UsageError` for a request that can never run or if the queue is full, `DeadlineError` after `seconds`,
        and any other error that ended one of them. All requests end when the caller stops iterating or gets an error.
        """
        loop = asyncio.get_running_loop()
        listener = _Listener(loop, asyncio.Queue())
        deadline = None
        if seconds is not None:
            late = _Event([], error=DeadlineError(f"The request took longer than {seconds:g} s."))
            deadline = loop.call_later(seconds, listener.events.put_nowait, late)
        num_open = len(requests)
        self._post(self._take, requests, listener)
        try:
            while num_open:
                event = await listener.events.get()
                num_open -= event.is_over
                if event.error is not None:
                    raise event.error
                yield event.updates
        finally:
            if deadline is not None:
                deadline.cancel()
            if num_open:
                self._post(self._abort, requests, listener)

    def close(self) -> None:
        """Stops the thread; open and new requests end with `ShutdownError`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _post(
        self, work: Callable[[Sequence[Request], _Listener], None], requests: Sequence[Request], listener: _Listener
    ) -> None:
        """Lets the thread do `work`; tells `listener` if the thread has ended."""
        with self._wake:
            if self._end is None:
                self._inbox.append((work, requests, listener))
                self._wake.notify()
                return
        _send([(listener, _Event([], is_over=True, error=self._end))])

    def _run(self) -> None:
        end: SheepOpError = ShutdownError("The server is shutting down.")
        try:
            while not self._stopping:
                with self._wake:
                    while self._engine.is_idle and not self._inbox and not self._stopping:
                        self._wake.wait()
                self._run_inbox()
                if not self._engine.is_idle:
                    self._step()
        except BaseException as error:
            _LOG.critical("the engine of %s has ended", self._name, exc_info=error)
            end = EngineDeadError(
                f"The engine of {self._name} has ended, so it answers nothing until it is loaded again: {_said(error)}"
            )
        with self._wake:
            self._end, inbox = end, self._inbox
        last = _Event([], is_over=True, error=end)
        _send([(listener, last) for listener in (*self._listeners.values(), *(listener for _, _, listener in inbox))])

    def _run_inbox(self) -> None:
        while self._inbox:
            work, requests, listener = self._inbox[0]
            work(requests, listener)
            self._inbox.popleft()  # only now, so that a listener hears of a fault

    def _take(self, requests: Sequence[Request], listener: _Listener) -> None:
        for request in requests:
            self._listeners[request] = listener
            try:
                self._engine.add(request)
            except BaseException as error:  # ends this request, and no other
                self._fail([request], error)
                self._engine.abort(request)
                return
        _send([(listener, _Event([]))])

    def _abort(self, requests: Sequence[Request], _: _Listener) -> None:
        for request in requests:
            if self._listeners.pop(request, None) is not None:
                self._engine.abort(request)

    def _step(self) -> None:
        try:
            with torch.inference_mode():
                updates = self._engine.step()
        except RanksError:  # without the other processes no step can succeed
            raise
        except BaseException as error:  # even a library's panic: requests that had begun get the error
            kept = self._engine.recover()
            self._fail([request for request in self._listeners if request not in kept], error)
            return
        by_request: dict[Request, list[Update]] = {}
        for update in updates:
            by_request.setdefault(update.request, []).append(update)
        self._notify({request: _of_step(found) for request, found in by_request.items()})

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """Tells that requests have ended by `error`; one of the engine itself is said in the log, too."""
        if not isinstance(error, SheepOpError):
            _LOG.error("the engine failed", exc_info=error)
            error = EngineFaultError(f"The engine failed: {_said(error)}")
        self._notify({request: _Event([], is_over=True, error=error) for request in requests})

    def _notify(self, events: dict[Request, _Event]) -> None:
        """Delivers events by request, waking each event loop only once for all of its events."""
        found = []
        for request, event in events.items():
            listener = self._listeners.pop(request, None) if event.is_over else self._listeners.get(request)
            if listener is not None:
                found.append((listener, event))
        _send(found)


def _of_step(updates: list[Update]) -> _Event:
    error = next((update.error for update in updates if update.error is not None), None)
    return _Event(updates, is_over=not updates[0].request.writing, error=error)


def _send(events: Sequence[tuple[_Listener, _Event]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[_Event], _Event]]] = {}
    for listener, event in events:
        by_loop.setdefault(listener.loop, []).append((listener.events, event))
    for loop, found in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_deliver, found)


def _deliver(found: list[tuple[asyncio.Queue[_Event], _Event]]) -> None:
    for queue, event in found:
        queue.put_nowait(event)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class SideWork:
    """Threads for slow work, such as templates and grammars, in its order; at most `most` calls are open."""

    def __init__(self, name: str, *, threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most, self._num_open = most, 0

    async def do(self, work: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Returns the result of `work`; raises `ApiError` 503 if too many calls are open.

        A waiting call is dropped if its caller is cancelled.
        """
        if self._num_open >= self._most:
            raise ApiError(
                503, "Too many requests are being prepared. Try again later.", kind="server_error", code="overloaded",
                retry_after=1,
            )  # fmt: skip
        self._num_open += 1
        try:
            task = partial(work, *arguments, **settings)
            return await asyncio.get_running_loop().run_in_executor(self._pool, task)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Drops waiting calls, and waits for the running ones."""
        self._pool.shutdown(cancel_futures=True)
