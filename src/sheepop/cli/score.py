"""``sheepop score``."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.options import (
    MODEL,
    Activations,
    Adapter,
    Context,
    Device,
    Dtype,
    Json,
    Quiet,
    make_console,
    print_json,
    print_text,
)
from sheepop.cli.terminal import print_styled
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line

if TYPE_CHECKING:
    from sheepop.evaluate.likelihood import Score

# The style of a token on a terminal by its lowest probability.
_STYLES = ((0.5, "green"), (0.05, "yellow"), (0.0, "red"))


def score(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="The text, of at least two words, or a file with it; a dash or nothing: standard input.",
            show_default=False,
        ),
    ] = "-",
    context: Context = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    activations: Activations = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how well a model predicts a text: the probability of every token, and bits per byte.

    A rank of 1 means that no other token was likelier. The first token is not predicted, unless the tokenizer puts a
    special token in front of every text. A model with a memory of its training text is scored without it, and with it.

    Examples:

      sheepop score runs/quickstart "To be or not to be"

      sheepop score runs/quickstart notes.txt

      echo Antidisestablishmentarianism | sheepop score runs/quickstart --json

      sheepop score models/smollm notes.txt --adapter adapters/polite
    """
    from sheepop.checkpoint.model_source import resolve_model_directory

    resolve_model_directory(model, make_console(quiet))
    if text == "-" and sys.stdin.isatty():
        make_console(quiet).info("Type a text; Ctrl-D at the beginning of a line ends it.")
    text = _read(text)
    from sheepop.jobs.generate import score as score_with

    found, remembered = score_with(
        model,
        text,
        context=context,
        device=device or "auto",
        dtype=dtype,
        activations=activations or "exact",
        adapters=adapter or (),
    )
    if as_json:
        with_memory = {} if remembered is None else {"with_memory": {**_summary(remembered), **asdict(remembered)}}
        print_json({**_summary(found), **asdict(found), **with_memory})
        return
    if not quiet:
        print_text(f"{'probability':>11} {'log-prob':>9} {'rank':>7}  token\n")
        for logprob, rank, piece in zip(found.logprobs, found.ranks, found.pieces, strict=True):
            probability = math.exp(logprob)
            style = next(style for least, style in _STYLES if probability >= least)
            print_styled(f"{probability:11.2%} {logprob:9.4f} {rank:7,}  {visible_line(piece)}\n", style)
    for name, each in (("", found), ("With the memory of the training text: ", remembered)):
        if each is not None:
            print_text(f"{name}{_words(each)}\n")


def _summary(found: Score) -> dict[str, float]:
    return {
        "num_tokens": len(found.logprobs),
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def _words(found: Score) -> str:
    windows = f", in windows of {found.context:,} tokens" if len(found.logprobs) > found.context else ""
    return (
        f"{counted(len(found.logprobs), 'token')}, {found.loss:.4f} nats per token, perplexity "
        f"{found.perplexity:.2f}, {found.bits_per_byte:.4f} bits per byte{windows}"
    )


def _read(text: str) -> str:
    """The text of a file or of standard input, or `text` itself if it has several words and no file has its name."""
    try:
        if text != "-" and len(text.split()) > 1 and not os.path.exists(text):  # noqa: PTH110 - long texts are no paths
            return text
        content = sys.stdin.buffer.read() if text == "-" else Path(text).read_bytes()
        return content.decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"The file {text} does not exist. A text of one word is read from standard input.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text} cannot be read as UTF-8 text: {error}.") from None
