"""``sheepop tokenizer train | convert | encode | show``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import MODEL, ConfiguredCommand, Group, Json, Quiet, make_console, print_json
from sheepop.core.errors import UsageError

app = typer.Typer(
    cls=Group, help="Train, convert and inspect tokenizers, and turn text into tokens.", no_args_is_help=True
)

Pattern = Annotated[
    str | None,
    typer.Option(help="How a rank file splits text: r50k, p50k, cl100k, o200k, kimi, or a regular expression."),
]
Source = Annotated[Path, typer.Argument(help=f"A tokenizer file or directory, a corpus, or a model. {MODEL}")]


@app.command("train", cls=ConfiguredCommand)
def train(
    inputs: Annotated[list[Path], typer.Argument(help="Files and folders of text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the tokenizer.")],
    algorithm: Annotated[
        str | None, typer.Option(help="bpe, wordpiece, unigram or char.", show_default="tokenizer.algorithm")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Size of the vocabulary; for char, the most it may have.", show_default="tokenizer.vocab_size"
        ),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="How bpe splits text: llama3, sheepop or gpt2.", show_default="tokenizer.pattern")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a tokenizer on files.

    Example:  sheepop tokenizer train notes/ --output tokenizers/notes --algorithm unigram --vocab-size 2048
    """
    from sheepop.jobs.tokenizer import train_from_files

    result = train_from_files(
        inputs, output, make_console(quiet), algorithm=algorithm, vocab_size=vocab_size, pattern=pattern
    )
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(
            f"Wrote {result['path']}: {result['vocab_size']:,} tokens, "
            f"{result['bytes_per_token']:.2f} bytes per token on the text it was trained on."
        )


@app.command("convert")
def convert(
    tokenizer: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the tokenizer.")],
    pattern: Pattern = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert a tokenizer from another program to tokenizer.json, with the same ids.

    Example:  sheepop tokenizer convert llama/tokenizer.model --output tokenizers/llama
    """
    from sheepop.jobs.tokenizer import convert_tokenizer

    result = convert_tokenizer(tokenizer, output, pattern)
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(f"Wrote {result['path']}: {result['algorithm']}, {result['vocab_size']:,} tokens.")
        for note in result["notes"]:
            typer.echo(note)


@app.command("encode")
def encode(
    tokenizer: Source,
    text: Annotated[str | None, typer.Argument(help="The text to encode.", show_default="standard input")] = None,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Encode <eos> and the like as special tokens.")
    ] = False,
    pattern: Pattern = None,
    as_json: Json = False,
) -> None:
    """Show the tokens of a text.

    Example:  sheepop tokenizer encode runs/quickstart "def main():"
    """
    from sheepop.jobs.tokenizer import encode_text

    if text is None:
        if sys.stdin.isatty():
            raise UsageError("Give the text as an argument, or pipe it in.")
        try:
            text = sys.stdin.buffer.read().decode("utf-8")  # line ends as they are
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not UTF-8 text: {error}.") from None
    rows = encode_text(tokenizer, text, allow_special, pattern)
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo(f"{row['id']:>7}  {row['text']!r}")


@app.command("show")
def show(
    tokenizer: Source,
    limit: Annotated[int, typer.Option(min=1, help="How many of the longest tokens to list.")] = 20,
    pattern: Pattern = None,
    as_json: Json = False,
) -> None:
    """Show the size, special tokens, chat templates and longest tokens of a tokenizer.

    Example:  sheepop tokenizer show runs/quickstart
    """
    from sheepop.jobs.tokenizer import describe_tokenizer

    result = describe_tokenizer(tokenizer, limit, pattern)
    if as_json:
        print_json(result)
        return
    for key in ("algorithm", "vocab_size", "fingerprint"):
        typer.echo(f"{key:<12} {result[key]}")
    specials = ", ".join(f"{text} {number}" for text, number in result["special_tokens"].items()) or "none"
    typer.echo(f"{'special':<12} {specials}")
    if result["chat_templates"]:
        typer.echo(f"{'chat':<12} {', '.join(result['chat_templates'])}")
    for note in result["notes"]:
        typer.echo(f"{'note':<12} {note}")
    typer.echo("longest tokens:")
    for row in result["longest"]:
        typer.echo(f"{row['id']:>7}  {row['text']!r}")
