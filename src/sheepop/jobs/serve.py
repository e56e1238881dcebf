"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.core.facts import counted
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.watched_runs import WatchedRuns
from sheepop.posttrain.rows import Prompt, read_rows
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.inside import PAGE
from sheepop.serve.registry import Registry, Stock
from sheepop.serve.server import Server, Service


def serve(
    places: Mapping[str, Path],
    config: SheepOpConfig,
    *,
    adapters: Mapping[str, Path] | None = None,
    dtype: str | None,
    console: Console,
    prompts: Sequence[str] = (),
    room: str | None = None,
) -> None:
    """Serves the models in `places` under their names, and the first of them with each adapter under its name.

    With the page (`server.ui`), runs can be watched and need no checkpoint yet; its arena draws from `prompts`, and the
    printed URL leads to the `room` if one is given. SIGTERM and Ctrl-C let open requests finish; SIGHUP reloads the
    models. Raises `UsageError` for a port that is taken.
    """
    runs = (
        {name: place for name, place in places.items() if RunDirectory(place).holds_run()} if config.server.ui else {}
    )
    stock = Stock(dict(places), dict(adapters or {}), config.server, config.device, dtype)
    _check_certificate(config.server)
    with _service(stock, config, runs, prompts, console) as (app, service):
        listener = _listen(config.server)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        scheme = "https" if config.server.certificate else "http"
        host, port = listener.getsockname()[:2]
        console.info(f"Serving {', '.join(stock.names)} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
        if config.server.ui:
            words, place = ("Look inside", "") if room is None else ("Open the page", f"#room={room}")
            console.info(f"{words} at {scheme}://{host}:{port}{PAGE}{place}")
        Server(app, service, config.server).run(sockets=[listener])


def serve_arena(
    places: Mapping[str, Path],
    config: SheepOpConfig,
    *,
    prompts: Path | None,
    dtype: str | None,
    console: Console,
) -> None:
    """Serves the page, as `serve` does, for votes between models on a file of prompts or on the voters' own.

    Raises `UsageError` for fewer than two models, and `DataError` for prompts that are not texts.
    """
    if len(places) < 2:
        raise UsageError(f"An arena needs two models; given: {', '.join(places) or 'none'}. Name another one.")
    texts: list[str] = []
    for row in [] if prompts is None else read_rows([prompts], Prompt):
        if not isinstance(row.prompt, str):
            raise DataError(f"{row.place}: prompt: an arena takes texts, and this is a conversation. Give a text.")
        texts.append(row.prompt)
    served = config.replace(server=config.server.replace(ui=True))
    # A duplicate prompt would be drawn twice as often.
    serve(places, served, dtype=dtype, console=console, prompts=list(dict.fromkeys(texts)), room="arena")


@contextmanager
def _service(
    stock: Stock, config: SheepOpConfig, runs: Mapping[str, Path], prompts: Sequence[str], console: Console
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application that serves the models, in this process or in replicas, and the service that it runs on."""
    server = config.server
    if server.engine == "local":
        later = [name for name, place in runs.items() if not RunDirectory(place).has_checkpoint()]
        for name in later:
            console.info(f"{name} has no checkpoint yet; the page can load the model once it has one.")
        registry = Registry(stock.load, [name for name in stock.names if name not in later], later=later)
        for model in registry.models():
            if model.generator.defaults:
                settings = ", ".join(f"{key} {value}" for key, value in model.generator.defaults.items())
                console.info(f"{model.name} has its own settings, used where a request gives none: {settings}.")
        yield create_app(registry, server, runs=WatchedRuns(runs), prompts=prompts), registry
        return
    try:
        from sheepop.serve.front import Front
        from sheepop.serve.replicas import replicas_on_ray
    except ImportError as error:
        raise UsageError(f"The engine ray needs Ray Serve: pip install 'sheepop[cluster]' ({error})") from None
    doorkeeper = Doorkeeper(server.api_keys, server.api_key)
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
        # The empty password keeps OpenSSL from asking for a passphrase on the terminal.
        context.load_cert_chain(config.certificate, config.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.certificate = {config.certificate} and server.private_key = {config.private_key} cannot be used: "
            f"{getattr(error, 'reason', None) or error}. They must be PEM files that belong together, the key without "
            "a passphrase."
        ) from None


def _listen(config: ServerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another --port or --host."
        ) from None
