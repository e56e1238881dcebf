"""``sheepop eval arena``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.options import (
    MODEL,
    ConfigFile,
    Device,
    Dtype,
    Json,
    Quiet,
    TemplateVariables,
    make_console,
    print_json,
    print_text,
    template_variables,
)
from sheepop.cli.serve import named_places
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.evaluate.ranking import Rated


def arena(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help=f"{MODEL} NAME=MODEL names it."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts in JSON lines to draw from.", show_default="the voters' own")
    ] = None,
    votes: Annotated[
        Path | None, typer.Option(help="The file that stores the votes.", show_default="server.votes")
    ] = None,
    standings: Annotated[
        Path | None, typer.Option(metavar="VOTES", help="Show the ranking from a file of votes; start no server.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.", show_default="server.host")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default="server.port")] = None,
    chat_template_kwargs: TemplateVariables = None,
    config: ConfigFile = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let people vote in the browser between the answers of two models that are not named.

    The votes make a ranking, and are preferences for `sheepop tune reward` and `sheepop tune dpo`.

    Examples:

      sheepop eval arena runs/base runs/chat --votes votes.jsonl

      sheepop eval arena old=runs/a new=runs/b --prompts prompts.jsonl --port 8080

      sheepop eval arena --standings votes.jsonl
    """
    if standings is not None:
        if models:
            raise UsageError("--standings reads votes and starts no server. Leave the models out.")
        from sheepop.evaluate.ranking import rank, read_votes

        _show_standings(rank(read_votes(standings)), as_json=as_json)
        return
    if as_json:
        raise UsageError("--json is only for --standings.")
    from sheepop.checkpoint.model_source import resolve_model_directory
    from sheepop.jobs.config import load_config

    places = named_places(models or [])
    for place in places.values():
        resolve_model_directory(place, make_console(quiet))
    server = {
        "host": host, "port": port, "votes": votes and str(votes),
        "chat_template_kwargs": template_variables(chat_template_kwargs),
    }  # fmt: skip
    options: dict[str, Any] = {"server": {key: value for key, value in server.items() if value is not None}}
    chosen = load_config(config, options={**options, **({} if device is None else {"device": device})})
    try:
        from sheepop.jobs.serve import serve_arena
    except ImportError as error:
        raise UsageError(f'Serving needs more packages: pip install "sheepop[serve]" ({error})') from None
    serve_arena(places, chosen, prompts=prompts, dtype=dtype, console=make_console(quiet))


def _show_standings(rated: Sequence[Rated], *, as_json: bool) -> None:
    """Prints a ranking of models, the strongest first."""
    from sheepop.report import MISSING

    if as_json:
        print_json([asdict(each) for each in rated])
        return
    lines = [f"{'strength':>8}  {'95 % interval':>15}  {'win rate':>8}  {'games':>6}  model"]
    for each in rated:
        low, high = each.interval
        # If all votes agree, the interval is empty.
        interval = f"{low:.0f} to {high:.0f}" if high > low else MISSING
        lines.append(f"{each.strength:8.0f}  {interval:>15}  {each.win_rate:8.1%}  {each.games:6,}  {each.name}")
    print_text("\n".join([*lines, ""]))
