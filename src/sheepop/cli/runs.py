"""``sheepop runs``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.options import Json, Quiet, make_console, print_json
from sheepop.core.errors import UsageError
from sheepop.core.facts import visible_line

if TYPE_CHECKING:
    from sheepop.jobs.run.listing import Comparison, Listing


class Sort(StrEnum):
    """The keys to sort runs by."""

    bits = "bits"
    loss = "loss"
    name = "name"
    steps = "steps"
    tokens = "tokens"
    time = "time"


def runs(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR | RUN RUN...]", help="A folder of runs, or runs to compare.", show_default="runs"),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare all runs of a folder.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory for the page and the pictures of a comparison.")
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="bits and loss: lowest first; name: A to Z; the rest: highest first.")
    ] = Sort.bits,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """List runs with their scores, or compare their settings and curves.

    Examples:

      sheepop runs

      sheepop runs runs/adamw runs/muon --output comparison

      sheepop runs runs --compare --sort loss --json
    """
    from sheepop.jobs.run.listing import compare_runs, list_runs, write_comparison

    places = paths or [Path("runs")]
    comparing = compare or len(places) > 1
    if output is not None and not comparing:
        raise UsageError("--output is for a comparison: name two runs, or add --compare.")
    console = make_console(quiet)
    comparison = compare_runs(places, sort=sort.value) if comparing else None
    listing = comparison.listing if comparison else list_runs(places, sort=sort.value)
    page = write_comparison(comparison, output) if comparison and output else None
    if as_json:
        print_json((comparison or listing).to_dict())
        return
    _print_table(listing)
    if comparison is not None:
        _print_settings(comparison)
        if comparison.warning:
            console.warn(comparison.warning)
    if page is not None:
        typer.echo(f"Page: {page}")
    for path, reason in listing.left_out.items():
        console.info(f"Left out: {path}: {reason}")


def _print_table(listing: Listing) -> None:
    from sheepop.jobs.run.listing import HEADER, row

    if not listing.runs:
        typer.echo("No runs. Make one with: sheepop quickstart")
        return
    _print_columns([HEADER, *(row(run.summary) for run in listing.runs)], left=2)


def _print_settings(comparison: Comparison) -> None:
    from sheepop.report import shown

    typer.echo()
    if not comparison.settings:
        typer.echo("All settings are the same.")
        return
    head = ("Setting", *(run.summary.name for run in comparison.listing.runs))
    _print_columns([head, *((name, *map(shown, values)) for name, values in comparison.settings.items())], left=1)


def _print_columns(rows: list[tuple[str, ...]], left: int) -> None:
    """Prints aligned columns: the first `left` ones flush left, the rest flush right."""
    rows = [tuple(visible_line(cell) for cell in cells) for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        aligned = (
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        typer.echo("  ".join(aligned).rstrip())
