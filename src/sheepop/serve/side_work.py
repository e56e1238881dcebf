"""Work beside the engine that may take long: templates, grammars, long prompts, embeddings. Nobody waits for it but
who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sheepop.serve.protocol import ApiError

T = TypeVar("T")


class SideWork:
    """Threads that do what they are asked for in turn; at most `most` pieces of work are open."""

    def __init__(self, name: str, *, threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most, self._num_open = most, 0

    async def do(self, work: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """What `work` returns; raises `ApiError` 503 when too much is open. Who stops waiting gives up his turn."""
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
        """Drops what has not begun, and waits for the rest."""
        self._pool.shutdown(cancel_futures=True)
