"""Threads for slow work outside the engine, such as templates, grammars, long prompts and embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sheepop.serve.protocol import ApiError

T = TypeVar("T")


class SideWork:
    """Threads that run calls in order; at most `most` calls are open."""

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
