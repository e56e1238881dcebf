"""``sheepop data build``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import ConfigFile, Json, Quiet, make_console, print_json

app = typer.Typer(help="Turn files into a corpus that training reads.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    pass


@app.command("build")
def build(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT... [KEY=VALUE]...", help="Files, folders, settings.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The corpus directory to write.")],
    config: ConfigFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Build a corpus directory: documents, tokenizer, token shards, manifest.

    Example:  sheepop data build notes/ book.txt --output corpora/mine tokenizer.vocab_size=2048
    """
    from sheepop.jobs.data import build

    result = build(inputs, output, config, make_console(quiet))
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(
            f"Wrote {result['path']}: {result['train_documents']:,} documents and {result['train_tokens']:,} tokens "
            f"to train on, {result['validation_documents']:,} and {result['validation_tokens']:,} held out. "
            f"{result['skipped_files']:,} files were left out; quarantine.jsonl says why."
        )
