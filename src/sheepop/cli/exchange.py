"""``sheepop import`` and ``sheepop export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sheepop.cli.options import Dtype, Json, Quiet, make_console, print_json

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier command wrote there.")]


def import_model(
    source: Annotated[Path, typer.Argument(help="A directory in the format of Hugging Face.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the model.")],
    dtype: Dtype = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer in place of the one in SOURCE.", show_default="its own")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take in a model that another program wrote: GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma, Phi-3, OLMo 2,
    GPT-NeoX, BLOOM.

    Examples:

      sheepop import downloads/SmolLM2-135M --output models/smollm

      sheepop import downloads/pythia-160m -o models/pythia --dtype float32
    """
    from sheepop.jobs.exchange import import_model

    result = import_model(
        source, output, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite, console=make_console(quiet or as_json)
    )
    _show(result, quiet, as_json)


def export_model(
    model: Annotated[Path, typer.Argument(help="A run, checkpoint or model directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the export.")],
    dtype: Dtype = None,
    max_shard_size: Annotated[str, typer.Option(help="Divide larger weights over several files.")] = "5GB",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give a model out for other programs, in the format of Hugging Face. What is written is read back and compared.

    Example:  sheepop export runs/quickstart --format hf --output exports/quickstart
    """
    from sheepop.jobs.exchange import export_model

    result = export_model(
        model,
        output,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        console=make_console(quiet or as_json),
    )
    _show(result, quiet, as_json)


def _show(result: dict[str, Any], quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(
            f"Wrote {result['path']}: {result['family']}, {result['parameters']:,} parameters, "
            f"{result['bytes'] / 1e6:,.1f} MB in {', '.join(result['dtypes'])}."
        )
