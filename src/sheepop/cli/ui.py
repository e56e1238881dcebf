"""``sheepop ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import Device, Dtype, Quiet
from sheepop.cli.serve import serve


def ui(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Runs, checkpoints or model directories; or NAME=DIRECTORY.")
    ],
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default="server.port")] = None,
    votes: Annotated[
        Path | None, typer.Option(help="Where votes on answers are kept.", show_default="server.votes")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A YAML or JSON config file.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Look inside models and runs with a browser: traces, number by number, chats, curves, texts and data.

    The page comes from this machine and asks no other; it is `sheepop serve --ui` on an address that only this machine
    can reach.

    Examples:

      sheepop ui runs/quickstart

      sheepop ui before=runs/base after=runs/chat --port 8080

      sheepop ui runs/*
    """
    serve(
        models,
        host="127.0.0.1",
        port=port,
        ui=True,
        votes=votes,
        config=config,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
