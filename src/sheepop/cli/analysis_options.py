"""The options that the verbs of ``sheepop analyze`` share, and how they run and print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.options import MODEL, make_console, print_json, print_text
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.interpret.control.analyses import Analyses
    from sheepop.interpret.control.finding import Finding

Model = Annotated[Path, typer.Argument(help=MODEL)]
Text = Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The prompt.", show_default=False)]
Prompt = Annotated[str | None, typer.Option(help="The prompt, instead of TEXT.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="A directory for numbers and pictures.")]
Exactness = Annotated[str, typer.Option("--dtype", help="float32 or float64.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the result of this verb at --output.")]
Steps = Annotated[int, typer.Option(min=2, help="Most steps of a search for singular values.")]
Probes = Annotated[int, typer.Option(min=4, help="Random directions for each estimate.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random directions.")]


def one_prompt(text: str | None, prompt: str | None) -> str:
    """The prompt of a command; raises `UsageError` unless there is one."""
    given = text if prompt is None else prompt
    if given is None or (text is not None and prompt is not None):
        raise UsageError("Give one prompt, as TEXT or with --prompt.")
    return given


def run_analysis(
    verb: str,
    model: Path,
    analysis: Callable[[Analyses], Finding],
    *,
    output: Path | None,
    adapter: list[Path] | None,
    device: str | None,
    dtype: str,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Runs an analysis of a model, writes the result to `output` if there is one, and prints it."""
    from sheepop.checkpoint.model_source import resolve_model_directory

    console = make_console(quiet or as_json)
    resolve_model_directory(model, console)
    from sheepop.jobs.analyze import AnalysisRequest, analyze

    request = AnalysisRequest(model, output, adapter or (), device or "auto", dtype, overwrite)
    found = analyze(request, verb, analysis)
    print_finding(found, output, quiet=quiet, as_json=as_json)


def print_finding(found: Finding, output: Path | None, *, quiet: bool, as_json: bool) -> None:
    """Prints the result of an analysis, and says where it was written."""
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        print_text("\n".join([*found.table(), "", *found.sentences(), "", *found.notes, ""]))
    if output is not None:
        make_console(quiet or as_json).info(f"Written: {output}")
