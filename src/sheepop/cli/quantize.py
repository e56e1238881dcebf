"""``sheepop quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sheepop.cli.exchange import Overwrite
from sheepop.cli.generation_options import read_text
from sheepop.cli.options import Json, Quiet, make_console, print_json


def quantize(
    model: Annotated[Path, typer.Argument(help="A run, checkpoint or model directory.")],
    to: Annotated[
        Literal["int8", "int4", "fp8"],
        typer.Option(help="int8 and fp8 take a quarter of float32's memory, int4 a 7th. fp8 is for GPUs that know it."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the smaller model.")],
    text: Annotated[
        Path | None, typer.Option(help="A text to measure with.", show_default="the model writes one")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Round a model's weights to 8 or 4 bits, and show the perplexity before and after.

    Examples:

      sheepop quantize runs/quickstart --to int8 --output models/quickstart-int8

      sheepop quantize models/smollm --to int4 -o models/smollm-int4 --text notes.txt
    """
    from sheepop.checkpoint.run_directory import resolve_model_directory

    resolve_model_directory(model)
    content = None if text is None else read_text(text, "text")
    from sheepop.jobs.quantize import quantize_model

    result = quantize_model(
        model, output, to=to, text=content, overwrite=overwrite, console=make_console(quiet or as_json)
    )
    if as_json:
        print_json(result)
    elif not quiet:
        before, after = result["perplexity_before"], result["perplexity_after"]
        typer.echo(
            f"Wrote {result['path']}: {result['quantized_parameters']:,} of {result['parameters']:,} parameters in "
            f"{to}, {result['bytes_before'] / 1e6:,.1f} MB before and {result['bytes_after'] / 1e6:,.1f} MB now.\n"
            f"Perplexity of a text {result['text']}: {before:.4g} before, {after:.4g} now ({after / before - 1:+.2%})."
        )
