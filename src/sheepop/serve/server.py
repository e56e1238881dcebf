"""The HTTP server: connections with time limits, and a shutdown that waits for open requests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from sheepop.core.errors import SheepOpError
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError

_LOG = logging.getLogger("sheepop.server")
_LARGEST_HEAD = 64 * 1024
_IDLE_SECONDS = 30
_TURN_SECONDS = 0.001
_SEARCH_SECONDS, _NEVER = 10, 2**30
_LAST_WORDS_SECONDS = 5  # to send the errors of requests that the shutdown ends


class Service(Protocol):
    """The part of a server that answers requests; it refuses new ones while it `is_draining`."""

    is_draining: bool

    @property
    def num_open(self) -> int:
        """The number of open requests."""

    def reload(self) -> None:
        """Reloads all models."""

    def close(self) -> None:
        """Closes all models; open requests end with an error."""


class Server(uvicorn.Server):
    """Serves `app`, whose requests `service` answers.

    After a signal to stop it refuses new requests and waits for the open ones; after `drain_seconds` it ends those with
    an error.
    """

    def __init__(self, app: ASGIApp, service: Service, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, client_seconds=config.client_seconds),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                ssl_certfile=config.certificate,
                ssl_keyfile=config.private_key,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
                h11_max_incomplete_event_size=_LARGEST_HEAD,
            )
        )
        self._service, self._drain_seconds = service, config.drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the server; in the main thread, also handles SIGHUP by reloading the models."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGTERM) == self.handle_exit:
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, self._reload))
        if threading.current_thread() is threading.main_thread():
            self._searching = loop.create_task(self._search_garbage())

    async def _search_garbage(self) -> None:
        """Searches for garbage now and then instead of after each large body, and lets threads take short turns."""
        # A search stops all threads, and for as long as there are objects.
        turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
        # A thread that has work waits this long for another, several times in the answer of /health.
        sys.setswitchinterval(_TURN_SECONDS)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*thresholds[:2], _NEVER)
        try:
            while True:
                await asyncio.sleep(_SEARCH_SECONDS)
                gc.collect()
        finally:
            sys.setswitchinterval(turn)
            gc.set_threshold(*thresholds)

    def _reload(self) -> None:
        try:
            self._service.reload()
        except SheepOpError as error:
            _LOG.error("%s", error)
        else:
            _LOG.info("The models were reloaded.")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for open requests, while new ones are refused with 503; then shuts down."""
        self._service.is_draining = True
        until = time.monotonic() + self._drain_seconds
        while self._service.num_open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._service.close)
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """HTTP/1.1 with limits for the client: `client_seconds` to send a request, and to read data that was sent."""

    def __init__(self, *arguments: Any, client_seconds: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._client_seconds = client_seconds
        self._arrival = _Limit(self.loop, client_seconds, self._give_up)
        self._reading = _Limit(self.loop, client_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time limit of the first request."""
        super().connection_made(transport)
        # asyncio does not disable Nagle's algorithm for sockets of our own listener; it would delay small pieces.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrival.begin()

    def data_received(self, data: bytes) -> None:
        """Starts the time limit of a request with its first byte, and ends it with the last one."""
        super().data_received(data)
        if self._is_arriving:
            self._arrival.begin()
        else:
            self._arrival.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends both time limits."""
        super().connection_lost(exc)
        self._arrival.end()
        self._reading.end()

    def pause_writing(self) -> None:
        """Starts the limit for reading: the client does not read the data that was sent."""
        super().pause_writing()
        self._reading.begin()

    def resume_writing(self) -> None:
        """Ends the limit for reading: the client reads again."""
        super().resume_writing()
        self._reading.end()

    def send_400_response(self, msg: str) -> None:
        """Refuses invalid HTTP with an error in the shape of all others."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    @property
    def _is_arriving(self) -> bool:
        """Whether a request has arrived only in part."""
        if self.conn.their_state is h11.IDLE:
            return bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY

    def _give_up(self) -> None:
        if self._is_arriving:
            message = f"The request did not arrive within {self._client_seconds:g} s."
            self._refuse(ApiError(408, message, code="request_timeout"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error unless an answer has begun, signals the disconnect, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            length = (b"content-length", str(len(body)).encode())
            headers = [length, (b"content-type", b"application/json"), (b"connection", b"close")]
            self.transport.write(self.conn.send(h11.Response(status_code=error.status_code, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.conn.send(h11.EndOfMessage())
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _Limit:
    """Calls `work` if `end` does not follow `begin` within `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, work: Callable[[], None]) -> None:
        self._loop, self._seconds, self._work = loop, seconds, work
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Starts the timer unless it is already running."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._work)

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
