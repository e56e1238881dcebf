"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel


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
    registry = Registry(
        lambda name: ServedModel.load(name, places[name], config, device=device, dtype=dtype), list(places)
    )
    listener = _listen(config)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = _Server(
        uvicorn.Config(
            create_app(registry, config),
            log_level="warning",
            access_log=False,
            ssl_certfile=config.certificate,
            ssl_keyfile=config.private_key,
            timeout_keep_alive=30,
            h11_max_incomplete_event_size=64 * 1024,
        ),
        registry,
        config.drain_seconds,
    )
    scheme = "https" if config.certificate else "http"
    host, port = listener.getsockname()[:2]
    console.info(f"Serving {', '.join(places)} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Takes no new requests once it is told to stop, and ends with the last open one, or after `drain_seconds`."""

    def __init__(self, config: uvicorn.Config, registry: Registry, drain_seconds: float) -> None:
        super().__init__(config)
        self._registry, self._drain_seconds = registry, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also listens for SIGHUP."""
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, self._registry.reload))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for open requests first; new ones are refused with 503 meanwhile."""
        self._registry.is_draining = True
        until = time.monotonic() + self._drain_seconds
        while self._registry.num_open and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.force_exit = self.force_exit or self._registry.num_open > 0
        await super().shutdown(sockets)


def _named(model: str) -> tuple[str, str]:
    name, equals, place = model.partition("=")
    if equals and name and "/" not in name:
        return name, place
    return Path(model).name or model, model


def _listen(config: ServerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another --port or --host."
        ) from None
