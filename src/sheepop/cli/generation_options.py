"""The options that say how a text is written, as ``generate`` and ``chat`` take them: one for each setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sheepop.core.errors import UsageError

_ENDING = "Length and end"
_DRAWING = "Choice of each token"
_SEARCHING = "Several texts"
_GRAMMAR = "Form of the text"
_SPEED = "Speed"

MaxNewTokens = Annotated[
    int | None,
    typer.Option(help="The most tokens to write.", show_default="generation.max_new_tokens", rich_help_panel=_ENDING),
]
MinNewTokens = Annotated[
    int | None,
    typer.Option(
        help="Do not end before this many tokens.", show_default="generation.min_new_tokens", rich_help_panel=_ENDING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text ($'\\n' is a line end); repeatable.", rich_help_panel=_ENDING),
]
Window = Annotated[
    bool,
    typer.Option("--window", help="Drop the oldest tokens when the context is full.", rich_help_panel=_ENDING),
]

Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="Always take the likeliest token (temperature 0).", rich_help_panel=_DRAWING),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Above 1 is wilder, below 1 tamer, 0 is greedy.",
        show_default="generation.temperature",
        rich_help_panel=_DRAWING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Draw from the K likeliest tokens.", show_default="all", rich_help_panel=_DRAWING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the likeliest tokens whose probabilities add up to P.",
        show_default="generation.top_p",
        rich_help_panel=_DRAWING,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Draw from tokens at least this many times as likely as the likeliest.",
        show_default="generation.min_p",
        rich_help_panel=_DRAWING,
    ),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the tokens that surprise about as much as the average one, until they add up to P.",
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
        help="Above 0 discourages tokens the more, the more often they are in the text.",
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
        help="Write this many texts for each prompt.",
        show_default="generation.num_completions",
        rich_help_panel=_SEARCHING,
    ),
]
BestOf = Annotated[
    int | None,
    typer.Option(
        help="Write this many, and keep the likeliest.",
        show_default="as many as are kept",
        rich_help_panel=_SEARCHING,
    ),
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Search for the likeliest text, following this many at a time.",
        show_default="generation.num_beams",
        rich_help_panel=_SEARCHING,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        help="How much --beams favours long texts; 0 compares probabilities.",
        show_default="generation.length_penalty",
        rich_help_panel=_SEARCHING,
    ),
]
TopLogprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json, the N likeliest tokens at each position.", show_default="none", rich_help_panel=_SEARCHING
    ),
]

JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT", help="Write JSON that fits this schema; '{}' is any JSON.", rich_help_panel=_GRAMMAR
    ),
]
Regex = Annotated[str | None, typer.Option(help="Write what this expression matches.", rich_help_panel=_GRAMMAR)]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", help="Write one of these texts; repeatable.", rich_help_panel=_GRAMMAR),
]
Grammar = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write what this Lark grammar allows.", rich_help_panel=_GRAMMAR),
]

TensorParallel = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Split the model over N processes, one a GPU.", rich_help_panel=_SPEED),
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
        metavar="MODEL", help="A smaller model that guesses; needs --guesses.", show_default="the text itself",
        rich_help_panel=_SPEED,
    ),
]  # fmt: skip
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Recompute everything for each token.", rich_help_panel=_SPEED)
]
CacheDtype = Annotated[
    Literal["auto", "int8"] | None,
    typer.Option(
        help="int8 caches keys and values in 8 bits.", show_default="generation.cache_dtype", rich_help_panel=_SPEED
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="No text depends on the others, to the last bit.", rich_help_panel=_SPEED),
]
Apart = Annotated[
    bool, typer.Option("--apart", help="Run several prompts one by one, not as a batch.", rich_help_panel=_SPEED)
]


def read_text(file: Path, what: str) -> str:
    """The text of a file that an option names; raises `UsageError` where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"The {what} {file} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The {what} {file} cannot be read as UTF-8 text: {error}.") from None


def read_schema(given: str) -> dict[str, object]:
    """The JSON schema of ``--json-schema``: a text that begins with a brace, or else the name of a file."""
    from sheepop.core.config import parse_config

    if given.lstrip().startswith("{"):
        return parse_config(given, where="--json-schema", is_json=True)
    return parse_config(read_text(Path(given), "schema file"), where=given, is_json=True)
