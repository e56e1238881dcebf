"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel


class Service(Protocol):
    """What answers requests, as the process sees it that takes them."""

    is_draining: bool

    @property
    def num_open(self) -> int:
        """Requests that are not over."""

    def reload(self) -> None:
        """Reads all models again."""


def serve(
    models: Sequence[str | Path], config: ServerConfig, *, device: str, dtype: str | None, console: Console
) -> None:
    """Loads the models and answers requests. SIGTERM and Ctrl-C let open requests finish; SIGHUP loads models anew.

    A model is called as its directory is, or ``NAME=DIRECTORY``. Raises `UsageError` for two of one name, or a port
    that is taken.
    """
    places = dict(_named(str(model)) for model in models)
    if len(places) < len(models):
        raise UsageError(f"Two models have the same name: {', '.join(places)}. Name one of them with NAME=DIRECTORY.")
    with _service(places, config, device, dtype, console) as (app, service):
        listener = _listen(config)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        scheme = "https" if config.certificate else "http"
        host, port = listener.getsockname()[:2]
        console.info(f"Serving {', '.join(places)} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            # These two whatever else is installed: h11 keeps the limit below, and there are no web sockets.
            http="h11",
            ws="none",
            ssl_certfile=config.certificate,
            ssl_keyfile=config.private_key,
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=64 * 1024,
        )
        _Server(settings, service, config.drain_seconds).run(sockets=[listener])


@contextmanager
def _service(
    places: Mapping[str, str], config: ServerConfig, device: str, dtype: str | None, console: Console
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application that serves the models, in this process or in replicas, and what looks after it."""
    if config.engine == "local":
        registry = Registry(
            lambda name: ServedModel.load(name, places[name], config, device=device, dtype=dtype), list(places)
        )
        yield create_app(registry, config), registry
        return
    try:
        from sheepop.serve.front import Front
        from sheepop.serve.replicas import replicas_on_ray
    except ImportError as error:
        raise UsageError(f"The engine ray needs Ray Serve: pip install 'sheepop[cluster]' ({error})") from None
    doorkeeper = Doorkeeper(config.api_keys)
    console.info(f"Starting {counted(config.replicas, 'replica')} on the Ray cluster.")
    known = doorkeeper.without_limits()
    with replicas_on_ray(places, config, known, device=device, dtype=dtype) as replicas:
        front = Front(replicas, config, doorkeeper)
        yield front, front


class _Server(uvicorn.Server):
    """Takes no new requests once it is told to stop, and ends with the last open one, or after `drain_seconds`."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also listens for SIGHUP."""
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, self._service.reload))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for open requests first; new ones are refused with 503 meanwhile."""
        self._service.is_draining = True
        until = time.monotonic() + self._drain_seconds
        while self._service.num_open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.force_exit = self.force_exit or self._service.num_open > 0
        await super().shutdown(sockets)


def _named(model: str) -> tuple[str, str]:
    name, equals, place = model.partition("=")
    if equals and name and "/" not in name:
        return name, str(Path(place).absolute())
    return Path(model).name or model, str(Path(model).absolute())


def _listen(config: ServerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another --port or --host."
        ) from None
