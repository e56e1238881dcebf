"""The verbs of ``sheepop analyze`` that look at a training run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.analysis_options import Output, Overwrite, print_finding
from sheepop.cli.options import Device, Json, Quiet

if TYPE_CHECKING:
    from sheepop.interpret.control.finding import Finding
    from sheepop.jobs.analyze_run import StoppedRun

Run = Annotated[Path, typer.Argument(help="A run directory, which sheepop train writes.")]
Step = Annotated[int | None, typer.Option(min=0, help="The step of a checkpoint, instead of the newest.")]
Rate = Annotated[float | None, typer.Option(min=0, help="A learning rate, instead of that of the step.")]
Rows = Annotated[int | None, typer.Option(min=2, help="Rows of the batch, instead of a half.")]
Products = Annotated[int, typer.Option(min=2, help="Most products with the Hessian.")]
Batches = Annotated[int, typer.Option(min=2, help="Batches to measure.")]


def sharpness(
    run: Run,
    step: Step = None,
    learning_rate: Rate = None,
    rows: Rows = None,
    products: Products = 14,
    output: Output = None,
    device: Device = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how near the learning rate of a run is to the limit of its optimizer.

    Shows the largest eigenvalue of the preconditioned Hessian against what the optimizer bears, where along the next
    step the loss turns, how fast weights move, the largest scores of attention, and dead heads and units.

    Examples:

      sheepop analyze sharpness runs/quickstart

      sheepop analyze sharpness runs/quickstart --step 100 --learning-rate 0.01
    """

    def analysis(found: StoppedRun) -> Finding:
        from sheepop.jobs.analyze_run import sharpness_of

        return sharpness_of(found, rows=rows, products=products)

    _run("sharpness", analysis, run, output, step, learning_rate, device, overwrite, quiet, as_json)


def noise(
    run: Run,
    step: Step = None,
    batches: Batches = 8,
    output: Output = None,
    device: Device = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure the noise of a run's gradient, and the batch that it recommends.

    Examples:

      sheepop analyze noise runs/quickstart --batches 16
    """

    def analysis(found: StoppedRun) -> Finding:
        from sheepop.jobs.analyze_run import noise_of

        return noise_of(found, batches=batches)

    _run("noise", analysis, run, output, step, None, device, overwrite, quiet, as_json)


def _run(
    verb: str,
    analysis: Callable[[StoppedRun], Finding],
    run: Path,
    output: Path | None,
    step: int | None,
    learning_rate: float | None,
    device: str | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run

    request = RunAnalysisRequest(run, output, step, learning_rate, device or "auto", overwrite)
    print_finding(analyze_run(request, verb, analysis), output, quiet=quiet, as_json=as_json)
