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
from typing import Any, TypeVar, cast

import torch

from sheepop.core.errors import SheepOpError
from sheepop.generate.engine import Engine, Update
from sheepop.generate.request import Request
from sheepop.generate.scheduler import Schedulable
from sheepop.serve.protocol import ApiError

T = TypeVar("T")
_LOG = logging.getLogger("sheepop.server")
_ENDING = "The server is shutting down."


class EngineFaultError(SheepOpError):
    """The engine failed for a reason that is not the fault of the request."""


class ShutdownError(SheepOpError):
    """The engine ended before the request did."""


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
        self._engine, self.scheduler = engine, engine.scheduler
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[int, _Listener] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self._thread.start()

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
        self._post(lambda: self._add(requests, listener))
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
                self._post(lambda: self._abort(requests))

    def close(self) -> None:
        """Stops the thread; open and new requests end with `ShutdownError`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._run_inbox()

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()
        if not self._thread.is_alive():
            self._run_inbox()

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                while self._engine.is_idle and not self._inbox and not self._stopping:
                    self._wake.wait()
            self._run_inbox()
            if not self._engine.is_idle:
                self._step()
        for request in [cast(Request, found) for found in self._scheduled()]:
            self._engine.abort(request)
            self._notify({id(request): _Event([], is_over=True, error=ShutdownError(_ENDING))})

    def _run_inbox(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, deque()
        for work in inbox:
            work()

    def _step(self) -> None:
        try:
            with torch.inference_mode():
                updates = self._engine.step()
        except BaseException as error:  # even a library's panic: running requests get the error, later ones are served
            self._fail(error)
            return
        by_request: dict[int, list[Update]] = {}
        for update in updates:
            by_request.setdefault(id(update.request), []).append(update)
        self._notify({number: _of_step(found) for number, found in by_request.items()})

    def _fail(self, error: BaseException) -> None:
        _LOG.error("the engine failed", exc_info=error)
        fault = EngineFaultError(f"The engine failed: {type(error).__name__}: {error}")
        # If no request was running, the step failed for a waiting one.
        for request in [cast(Request, found) for found in self.scheduler.running or self._scheduled()]:
            self._engine.abort(request)
            self._notify({id(request): _Event([], is_over=True, error=fault)})

    def _scheduled(self) -> list[Schedulable]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _add(self, requests: Sequence[Request], listener: _Listener) -> None:
        for request in requests:
            self._listeners[id(request)] = listener
            try:
                if self._stopping:
                    raise ShutdownError(_ENDING)
                self._engine.add(request)
            except SheepOpError as error:
                self._notify({id(request): _Event([], is_over=True, error=error)})
                return
        self._notify({id(requests[0]): _Event([])})

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._listeners.pop(id(request), None) is not None:
                self._engine.abort(request)

    def _notify(self, events: dict[int, _Event]) -> None:
        """Delivers events by request, and wakes each event loop only once for all of its events."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[_Event], _Event]]] = {}
        for number, event in events.items():
            listener = self._listeners.pop(number, None) if event.is_over else self._listeners.get(number)
            if listener is not None:
                by_loop.setdefault(listener.loop, []).append((listener.events, event))
        for loop, found in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_deliver, found)


def _of_step(updates: list[Update]) -> _Event:
    error = next((update.error for update in updates if update.error is not None), None)
    return _Event(updates, is_over=not updates[0].request.writing, error=error)


def _deliver(found: list[tuple[asyncio.Queue[_Event], _Event]]) -> None:
    for queue, event in found:
        queue.put_nowait(event)


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
