"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.facts import counted
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.watched_runs import WatchedRuns
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.inside import PAGE
from sheepop.serve.registry import Registry
from sheepop.serve.server import Server, Service
from sheepop.serve.stock import Stock


def serve(
    places: Mapping[str, Path],
    config: SheepOpConfig,
    *,
    adapters: Mapping[str, Path] | None = None,
    dtype: str | None,
    console: Console,
) -> None:
    """Serves the models in these places under these names, and the first of them with each of the adapters under its.

    With the page, places that are runs are watched too, and need no checkpoint yet. SIGTERM and Ctrl-C let open
    requests finish; SIGHUP loads models anew. Raises `UsageError` for a port that is taken.
    """
    runs = (
        {name: place for name, place in places.items() if RunDirectory(place).holds_run()} if config.server.ui else {}
    )
    stock = Stock(dict(places), dict(adapters or {}), config.server, config.device, dtype)
    _check_certificate(config.server)
    with _service(stock, config, runs, console) as (app, service):
        listener = _listen(config.server)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        scheme = "https" if config.server.certificate else "http"
        host, port = listener.getsockname()[:2]
        console.info(f"Serving {', '.join(stock.names)} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
        if config.server.ui:
            console.info(f"Look inside at {scheme}://{host}:{port}{PAGE}")
        Server(app, service, config.server).run(sockets=[listener])


@contextmanager
def _service(
    stock: Stock, config: SheepOpConfig, runs: Mapping[str, Path], console: Console
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application that serves the models, in this process or in replicas, and what looks after it."""
    server = config.server
    if server.engine == "local":
        later = [name for name, place in runs.items() if not RunDirectory(place).has_checkpoint()]
        for name in later:
            console.info(f"{name} has no checkpoint yet; the page can read it once it has one.")
        registry = Registry(stock.load, [name for name in stock.names if name not in later], later=later)
        yield create_app(registry, server, runs=WatchedRuns(runs)), registry
        return
    try:
        from sheepop.serve.front import Front
        from sheepop.serve.replicas import replicas_on_ray
    except ImportError as error:
        raise UsageError(f"The engine ray needs Ray Serve: pip install 'sheepop[cluster]' ({error})") from None
    doorkeeper = Doorkeeper(server.api_keys)
    console.info(f"Starting {counted(server.replicas, 'replica')} on the Ray cluster.")
    known = doorkeeper.without_limits()
    with replicas_on_ray(stock, known) as replicas:
        front = Front(replicas, server, doorkeeper)
        yield front, front


def _check_certificate(config: ServerConfig) -> None:
    """Raises `ConfigError` for a certificate or key that cannot be used, before models are loaded."""
    if config.certificate is None or config.private_key is None:
        return
    for name, path in (("certificate", config.certificate), ("private_key", config.private_key)):
        if not Path(path).is_file():
            raise ConfigError(f"server.{name}: there is no file {path}.")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Where a key has a passphrase, nobody is asked for it: a server starts by itself.
        context.load_cert_chain(config.certificate, config.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.certificate = {config.certificate} and server.private_key = {config.private_key} cannot be used: "
            f"{getattr(error, 'reason', None) or error}. They have to be PEM files that belong together, the key "
            "without a passphrase."
        ) from None


def _listen(config: ServerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another --port or --host."
        ) from None
