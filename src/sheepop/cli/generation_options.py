"""The options of ``generate`` and ``chat`` that control generation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sheepop.core.errors import UsageError

_ENDING = "Length and end"
_DRAWING = "Sampling"
_SEARCHING = "Several texts"
_GRAMMAR = "Output format"
_SPEED = "Speed"

MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens to generate.", show_default="generation.max_new_tokens", rich_help_panel=_ENDING
    ),
]
MinNewTokens = Annotated[
    int | None,
    typer.Option(
        help="Minimum number of tokens to generate.", show_default="generation.min_new_tokens", rich_help_panel=_ENDING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop before this text ($'\\n' is a line break); repeatable.", rich_help_panel=_ENDING),
]
Window = Annotated[
    bool,
    typer.Option("--window", help="Drop the oldest tokens when the context is full.", rich_help_panel=_ENDING),
]

Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="Always take the most likely token (temperature 0).", rich_help_panel=_DRAWING),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Above 1 makes the text more varied, below 1 less; 0 is greedy.",
        show_default="generation.temperature",
        rich_help_panel=_DRAWING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample from the K most likely tokens.", show_default="all", rich_help_panel=_DRAWING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most likely tokens whose probabilities add up to P.",
        show_default="generation.top_p",
        rich_help_panel=_DRAWING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample from tokens at least this fraction as likely as the most likely one.",
        show_default="generation.min_p",
        rich_help_panel=_DRAWING,
    ),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the tokens with the most typical surprise whose probabilities add up to P.",
        show_default="generation.typical_p",
        rich_help_panel=_DRAWING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 discourages tokens already in the prompt or the text.",
        show_default="generation.repetition_penalty",
        rich_help_panel=_DRAWING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 0 discourages tokens already in the text.",
        show_default="generation.presence_penalty",
        rich_help_panel=_DRAWING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 0 discourages tokens in proportion to their count in the text.",
        show_default="generation.frequency_penalty",
        rich_help_panel=_DRAWING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same text.", show_default="random", rich_help_panel=_DRAWING),
]

NumCompletions = Annotated[
    int | None,
    typer.Option(
        "--num-completions",
        "-n",
        help="Number of texts to generate for each prompt.",
        show_default="generation.num_completions",
        rich_help_panel=_SEARCHING,
    ),
]
BestOf = Annotated[
    int | None,
    typer.Option(
        help="Generate this many texts, and keep the most likely.",
        show_default="as --num-completions",
        rich_help_panel=_SEARCHING,
    ),
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Search for the most likely text with this many beams.",
        show_default="generation.num_beams",
        rich_help_panel=_SEARCHING,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        help="How much --beams favours long texts; 0 compares plain probabilities.",
        show_default="generation.length_penalty",
        rich_help_panel=_SEARCHING,
    ),
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json, list the N most likely tokens at each position.",
        show_default="none",
        rich_help_panel=_SEARCHING,
    ),
]

JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT",
        help="Generate JSON that fits this schema; '{}' allows any JSON.",
        rich_help_panel=_GRAMMAR,
    ),
]
Regex = Annotated[
    str | None, typer.Option(help="Generate text that matches this regular expression.", rich_help_panel=_GRAMMAR)
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", help="Generate one of these texts; repeatable.", rich_help_panel=_GRAMMAR),
]
Grammar = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Generate text that this Lark grammar allows.", rich_help_panel=_GRAMMAR),
]

TensorParallel = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Split the model over N processes, one per GPU.", rich_help_panel=_SPEED),
]
Guesses = Annotated[
    int | None,
    typer.Option(
        help="Guess N tokens ahead and check them in one pass; the text stays the same.",
        show_default="generation.guesses",
        rich_help_panel=_SPEED,
    ),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="A smaller model that makes the guesses; needs --guesses.",
        show_default="repeats in the text",
        rich_help_panel=_SPEED,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Recompute keys and values for each token.", rich_help_panel=_SPEED)
]
CacheDtype = Annotated[
    Literal["auto", "int8"] | None,
    typer.Option(
        help="int8 caches keys and values in 8 bits.", show_default="generation.cache_dtype", rich_help_panel=_SPEED
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="Each text is bit for bit the same in any batch.", rich_help_panel=_SPEED),
]
Apart = Annotated[
    bool, typer.Option("--apart", help="Run the prompts one by one, not as a batch.", rich_help_panel=_SPEED)
]


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
