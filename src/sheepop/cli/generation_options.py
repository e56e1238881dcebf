"""The options of ``generate`` and ``chat`` that control generation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sheepop.core.console import Console
from sheepop.core.errors import UsageError

_ending = partial(typer.Option, rich_help_panel="Length and end")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_searching = partial(typer.Option, rich_help_panel="Several texts")
_format = partial(typer.Option, rich_help_panel="Output format")
_speed = partial(typer.Option, rich_help_panel="Speed")

MaxNewTokens = Annotated[
    int | None, _ending(help="Maximum number of tokens to generate.", show_default="generation.max_new_tokens")
]
MinNewTokens = Annotated[
    int | None, _ending(help="Minimum number of tokens to generate.", show_default="generation.min_new_tokens")
]
Stop = Annotated[
    list[str] | None, _ending("--stop", help="Stop before this text ($'\\n' is a line break); repeatable.")
]
Window = Annotated[bool, _ending("--window", help="Drop the oldest tokens when the context is full.")]

Greedy = Annotated[bool, _sampling("--greedy", help="Always take the most likely token (temperature 0).")]
Temperature = Annotated[
    float | None,
    _sampling(
        help="Above 1 makes the text more varied, below 1 less; 0 is greedy.", show_default="generation.temperature"
    ),
]
TopK = Annotated[int | None, _sampling(help="Sample from the K most likely tokens.", show_default="all")]
TopP = Annotated[
    float | None,
    _sampling(
        help="Sample from the most likely tokens whose probabilities add up to P.", show_default="generation.top_p"
    ),
]
MinP = Annotated[
    float | None,
    _sampling(
        help="Sample from tokens at least this fraction as likely as the most likely one.",
        show_default="generation.min_p",
    ),
]
TypicalP = Annotated[
    float | None,
    _sampling(
        help="Sample from the tokens closest to the average surprise whose probabilities add up to P.",
        show_default="generation.typical_p",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    _sampling(
        help="Above 1 discourages tokens already in the prompt or the text.",
        show_default="generation.repetition_penalty",
    ),
]
PresencePenalty = Annotated[
    float | None,
    _sampling(help="Above 0 discourages tokens already in the text.", show_default="generation.presence_penalty"),
]
FrequencyPenalty = Annotated[
    float | None,
    _sampling(
        help="Above 0 discourages tokens in proportion to their count in the text.",
        show_default="generation.frequency_penalty",
    ),
]
Seed = Annotated[int | None, _sampling(help="The same seed gives the same text.", show_default="random")]

NumCompletions = Annotated[
    int | None,
    _searching(
        "--num-completions",
        "-n",
        help="Number of texts to generate for each prompt.",
        show_default="generation.num_completions",
    ),
]
BestOf = Annotated[
    int | None,
    _searching(help="Generate this many texts, and keep the most likely.", show_default="as --num-completions"),
]
Beams = Annotated[
    int | None,
    _searching(help="Search for the most likely text with this many beams.", show_default="generation.num_beams"),
]
LengthPenalty = Annotated[
    float | None,
    _searching(
        help="How much --beams favours long texts; 0 compares plain probabilities.",
        show_default="generation.length_penalty",
    ),
]
TopLogprobs = Annotated[
    int | None,
    _searching(help="With --json, list the N most likely tokens at each position.", show_default="none"),
]

JsonSchema = Annotated[
    str | None, _format(metavar="FILE|TEXT", help="Generate JSON that fits this schema; '{}' allows any JSON.")
]
Regex = Annotated[str | None, _format(help="Generate text that matches this regular expression.")]
Choice = Annotated[list[str] | None, _format("--choice", help="Generate one of these texts; repeatable.")]
Grammar = Annotated[Path | None, _format(metavar="FILE", help="Generate text that this Lark grammar allows.")]

TensorParallel = Annotated[int, _speed(min=1, metavar="N", help="Split the model over N processes, one per GPU.")]
Guesses = Annotated[
    int | None,
    _speed(
        help="Guess N tokens ahead and check them in one pass; the text stays the same.",
        show_default="generation.guesses",
    ),
]
DraftModel = Annotated[
    Path | None,
    _speed(
        metavar="MODEL",
        help="A smaller model that makes the guesses; needs --guesses.",
        show_default="repeats in the text",
    ),
]
NoMemory = Annotated[
    bool, typer.Option("--no-memory", help="Leave the memory of the training text, if the model has one, aside.")
]
MaxBatchSize = Annotated[
    int | None,
    _speed(
        "--max-batch-size", help="Write at most N texts at a time; 1 writes one after the other.", show_default="16"
    ),
]
CacheDtype = Annotated[
    Literal["auto", "int8", "fp8"] | None,
    _speed(help="int8 and fp8 cache keys and values in 8 bits.", show_default="generation.cache_dtype"),
]
Activations = Annotated[
    Literal["exact", "rounded"] | None,
    _speed(
        help="rounded rounds the inputs of products on a CPU: faster, less exact.",
        show_default="generation.activations",
    ),
]
BatchInvariant = Annotated[bool, _speed("--batch-invariant", help="Each text is bit for bit the same in any batch.")]


def show_defaults(defaults: Mapping[str, Any], console: Console) -> None:
    """Prints the settings that a model brings along, if any."""
    if defaults:
        settings = ", ".join(f"{name} {value}" for name, value in defaults.items())
        console.info(f"The model's own settings: {settings}. Options override them.")


def read_text(file: Path, what: str) -> str:
    """The text of a file; raises `UsageError` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"The {what} {file} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The {what} {file} cannot be read as UTF-8 text: {error}.") from None


def read_schema(given: str) -> dict[str, object]:
    """The schema of ``--json-schema``: JSON text that starts with a brace, or else the name of a file."""
    from sheepop.core.config import parse_config

    if given.lstrip().startswith("{"):
        return parse_config(given, where="--json-schema", is_json=True)
    return parse_config(read_text(Path(given), "schema file"), where=given, is_json=True)
