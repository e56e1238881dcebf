"""Serves models over HTTP until the process is told to stop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.serve.server import Server


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
    server = Server(registry, config)
    scheme = "https" if config.certificate else "http"
    host, port = listener.getsockname()[:2]
    console.info(f"Serving {', '.join(places)} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
    server.run(sockets=[listener])


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
