"""``sheepop quickstart``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import Device, Exportable, Json, Overrides, Quiet, make_console, print_json, typed_command
from sheepop.cli.terminal import print_styled


def quickstart(
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run directory.")] = Path("runs/quickstart"),
    minutes: Annotated[float | None, typer.Option(help="Minutes from reading to the report.", show_default="5")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Your own files instead of Python's standard library; repeatable."),
    ] = None,
    device: Device = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of every random choice.", show_default="0")] = None,
    exportable: Exportable = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted quickstart.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run at --output.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a small language model on real files, show what it writes, and measure how good it is.

    Examples:

      sheepop quickstart

      sheepop quickstart --data notes/ --output runs/notes --minutes 10

      sheepop quickstart --data poems.txt --output runs/poems tokenizer.algorithm=char
    """
    from sheepop.jobs.config import refuse_mistyped

    refuse_mistyped(overrides or ())
    from sheepop.jobs.quickstart import quickstart as quickstart_job
    from sheepop.jobs.quickstart import render_outcome

    outcome = quickstart_job(
        output,
        minutes=minutes,
        paths=data or [],
        device=device or "auto",
        seed=seed,
        exportable=exportable,
        overrides=overrides or (),
        resume=resume,
        overwrite=overwrite,
        console=make_console(quiet),
        command=typed_command(),
    )
    if as_json:
        print_json(outcome.to_dict())
    elif not quiet:
        for piece, style in render_outcome(outcome):
            print_styled(piece, style)
