"""``sheepop bench``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sheepop.cli.options import Activations, Device, Dtype, Json, Quiet, make_console, print_json
from sheepop.core.errors import UsageError


def bench(
    name: Annotated[
        Literal["train", "generate"] | None, typer.Argument(help="The benchmark to run.", show_default="both")
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(help="With `generate`: a model to measure, by path or name.", show_default="a preset"),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="The model preset to measure.", show_default="llama-4m")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for each measurement.")] = 10.0,
    device: Device = None,
    dtype: Dtype = None,
    activations: Activations = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains and generates, and what share of its peak matrix speed that is.

    With a model it measures reading a prompt and writing 1, 8 and 32 texts, greedy and sampled, and names what limits
    the speed.

    Examples:  sheepop bench train --preset gpt2

               sheepop bench generate Qwen/Qwen3-0.6B --seconds 3
    """
    from sheepop.jobs.bench import bench, render_bench
    from sheepop.jobs.model_bench import bench_model, render_model_bench

    console = make_console(quiet)
    if model is not None:
        if name != "generate" or preset is not None:
            raise UsageError("A model is measured by 'sheepop bench generate MODEL', without --preset.")
        result = bench_model(
            model,
            seconds=seconds,
            device=device or "auto",
            dtype=dtype,
            activations=activations or "exact",
            console=console,
        )
        text = render_model_bench(result)
    else:
        if dtype is not None or activations is not None:
            raise UsageError(
                "--dtype and --activations are for a model. Without one, every suitable precision is measured."
            )
        result = bench(name, preset=preset or "llama-4m", seconds=seconds, device=device or "auto", console=console)
        text = render_bench(result)
    if as_json:
        print_json(result)
    else:
        typer.echo(text)
