"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.serve.server import Server, Service


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
        Server(app, service, config).run(sockets=[listener])


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
