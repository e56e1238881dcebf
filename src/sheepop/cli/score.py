"""``sheepop score``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import Device, Dtype, Json, Quiet, print_json, print_text
from sheepop.core.errors import UsageError
from sheepop.core.facts import visible_line


def score(
    model: Annotated[Path, typer.Argument(help="A run, checkpoint or model directory.")],
    file: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="The text; a dash, or nothing, is standard input.")
    ] = "-",
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how well a model predicts a text: the log-probability of every token, and bits per byte.

    Examples:

      sheepop score runs/quickstart notes.txt

      echo "To be or not to be" | sheepop score runs/quickstart --json
    """
    from sheepop.checkpoint.run_directory import resolve_model_directory

    text = _read(file)
    resolve_model_directory(model)
    from sheepop.language_model import load

    found = load(model, device or "auto", dtype).score(text)
    summary = {
        "tokens": len(found.logprobs),
        "bytes": found.num_bytes,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    if as_json:
        print_json({**summary, **asdict(found)})
        return
    if not quiet:
        print_text(f"{'log-probability':>15} {'rank':>7}  token\n")
        for logprob, rank, piece in zip(found.logprobs, found.ranks, found.pieces, strict=True):
            print_text(f"{logprob:15.4f} {rank:7,}  {visible_line(piece)}\n")
    print_text(
        f"{summary['tokens']:,} tokens, {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}, "
        f"{found.bits_per_byte:.4f} bits per byte\n"
    )


def _read(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"The file {file} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}.") from None
