"""``sheepop ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import MODEL, ConfigFile, Device, Dtype, Quiet
from sheepop.cli.serve import start


def ui(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"{MODEL} NAME=MODEL names it.")],
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default="server.port")] = None,
    votes: Annotated[
        Path | None, typer.Option(help="The file that stores the votes given on the page.", show_default="server.votes")
    ] = None,
    config: ConfigFile = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Look inside models and runs in the browser: traces, chats, training curves, samples and data.

    The same as `sheepop serve --ui` on an address that only this machine can reach, without a log of requests. The page
    loads nothing from other machines. From a terminal on a screen, it opens in the browser.

    Examples:

      sheepop ui runs/quickstart

      sheepop ui before=runs/base after=runs/chat --port 8080

      sheepop ui runs/*
    """
    server = {"host": "127.0.0.1", "port": port, "ui": True, "votes": votes and str(votes)}
    options = {"server": {key: value for key, value in server.items() if value is not None}}
    start(models, options, config, [], [], device=device, dtype=dtype, quiet=quiet, for_page=True)
