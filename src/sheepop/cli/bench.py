"""``sheepop bench``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sheepop.cli.options import Device, Json, Quiet, make_console, print_json


def bench(
    name: Annotated[
        Literal["train", "generate"] | None, typer.Argument(help="The benchmark to run.", show_default="both")
    ] = None,
    preset: Annotated[str, typer.Option(help="The model preset to measure.")] = "llama-4m",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for each measurement.")] = 10.0,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains and generates, and what share of its peak matrix speed that is.

    Example:  sheepop bench train --preset gpt2
    """
    from sheepop.jobs.bench import bench, render_bench

    result = bench(name, preset=preset, seconds=seconds, device=device or "auto", console=make_console(quiet))
    if as_json:
        print_json(result)
    else:
        typer.echo(render_bench(result))
