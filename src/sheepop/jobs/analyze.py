"""Analyses of a model as a control system: opens it at a prompt, analyses, writes numbers and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sheepop.core.errors import OutputError
from sheepop.core.files import make_directory, storage_errors, write_json
from sheepop.interpret.control.analyses import Analyses
from sheepop.interpret.control.finding import Finding
from sheepop.jobs.generate import load_adapted
from sheepop.report import save_png, save_svg

Found = TypeVar("Found", bound=Finding)


@dataclass(frozen=True)
class AnalysisRequest:
    """A model to analyse, with adapters, in float32 or float64 (`dtype`), and where to write the result.

    `output` is a directory that may hold the results of other analyses; None writes nothing.
    """

    model: str | Path
    output: Path | None = None
    adapters: Sequence[str | Path] = ()
    device: str = "auto"
    dtype: str = "float32"
    overwrite: bool = False


def open_model(request: AnalysisRequest) -> Analyses:
    """Loads the model of a request, whose result is then `request.dtype`."""
    loaded = load_adapted(request.model, request.adapters, device=request.device)
    return Analyses(loaded.model, loaded.tokenizer, request.dtype)


def analyze(request: AnalysisRequest, verb: str, analysis: Callable[[Analyses], Found]) -> Found:
    """Runs an analysis and writes its result as `write_finding` does.

    Raises `OutputError` before any work if a result of this `verb` is there already.
    """
    require_no_result(request.output, verb, overwrite=request.overwrite)
    found = analysis(open_model(request))
    if request.output is not None:
        write_finding(found, request.output)
    return found


def require_no_result(output: Path | None, verb: str, *, overwrite: bool) -> None:
    """Raises `OutputError` if `output` has a result of this `verb` that must not be replaced."""
    if output is not None and not overwrite and (place := output / f"{verb}.json").exists():
        raise OutputError(f"{place} already exists. Choose another directory, or replace it with --overwrite.")


def write_finding(found: Finding, directory: Path) -> None:
    """Writes ``VERB.json`` and each picture as PNG and SVG into a directory, which is made if it is missing."""
    with storage_errors(directory):
        make_directory(directory)
    for picture in found.pictures():
        save_png(picture.figure, directory / f"{picture.name}.png")
        save_svg(picture.figure, directory / f"{picture.name}.svg")
    write_json(directory / f"{found.verb}.json", found.to_dict())
