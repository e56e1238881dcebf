"""An engine in a thread of its own, and the tasks of an event loop that wait for what it writes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

import torch

from sheepop.core.errors import SheepOpError, UsageError
from sheepop.generate.engine import Engine, Update
from sheepop.generate.request import Request


class EngineFaultError(SheepOpError):
    """The engine failed at a request for a reason that is no fault of the request."""


@dataclass(frozen=True)
class _News:
    """What a step brought for a request, or what ended it; the last of it where the request `is_over`."""

    updates: list[Update]
    is_over: bool = False
    error: SheepOpError | None = None


@dataclass(frozen=True)
class _Listener:
    """Who waits for a request: a queue of its news in an event loop."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[_News]


class EngineWorker:
    """Runs an engine for many tasks at a time. A request that goes wrong ends alone; the engine goes on."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[int, _Listener] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._engine.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that are written."""
        return len(self._engine.scheduler.running)

    @property
    def cache_use(self) -> float:
        """The share of the cache's blocks that running requests hold."""
        manager = self._engine.scheduler.manager
        return 1 - min(free / count for free, count in zip(manager.num_free, manager.num_blocks, strict=True))

    async def write(self, request: Request) -> AsyncIterator[list[Update]]:
        """The updates of a request, those of a step together, until it is over.

        Raises `UsageError` for a request that can never run or finds no room to wait, and what else ended it. A caller
        that stops listening ends the request.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._post(lambda: self._add(request, listener))
        over = False
        try:
            while not over:
                news = await listener.news.get()
                over = news.is_over
                if news.error is not None:
                    raise news.error
                yield news.updates
        finally:
            if not over:
                self._post(lambda: self._abort(request))

    def close(self) -> None:
        """Stops the thread; requests that are not over are aborted."""
        self._post(self._stop)
        self._thread.join()

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                while self._engine.is_idle and not self._inbox:
                    self._wake.wait()
                inbox, self._inbox = self._inbox, deque()
            for work in inbox:
                work()
            if not self._engine.is_idle:
                self._step()

    def _step(self) -> None:
        try:
            with torch.inference_mode():
                updates = self._engine.step()
        except Exception as error:  # whatever it was, the requests that run are told, and the next ones are served
            self._fail(error)
            return
        by_request: dict[int, list[Update]] = {}
        for update in updates:
            by_request.setdefault(id(update.request), []).append(update)
        for number, found in by_request.items():
            wrong = next((update.error for update in found if update.error is not None), None)
            self._tell(number, _News(found, is_over=not found[0].request.writing, error=wrong))

    def _fail(self, error: Exception) -> None:
        fault = EngineFaultError(f"The engine failed: {type(error).__name__}: {error}")
        for request in [cast(Request, request) for request in self._engine.scheduler.running]:
            self._engine.abort(request)
            self._tell(id(request), _News([], is_over=True, error=fault))

    def _add(self, request: Request, listener: _Listener) -> None:
        self._listeners[id(request)] = listener
        try:
            self._engine.add(request)
        except UsageError as error:
            self._tell(id(request), _News([], is_over=True, error=error))

    def _abort(self, request: Request) -> None:
        if self._listeners.pop(id(request), None) is not None:
            self._engine.abort(request)

    def _stop(self) -> None:
        self._stopping = True
        for request in [
            cast(Request, request) for request in (*self._engine.scheduler.running, *self._engine.scheduler.waiting)
        ]:
            self._engine.abort(request)
            error = EngineFaultError("The server is shutting down.")
            self._tell(id(request), _News([], is_over=True, error=error))

    def _tell(self, number: int, news: _News) -> None:
        listener = self._listeners.pop(number, None) if news.is_over else self._listeners.get(number)
        if listener is not None and not listener.loop.is_closed():
            listener.loop.call_soon_threadsafe(listener.news.put_nowait, news)
