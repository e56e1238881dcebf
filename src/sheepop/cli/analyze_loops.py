"""The verbs of ``sheepop analyze`` that look at the loops of generation and of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli import analyze
from sheepop.cli.analysis_options import Output, Overwrite, at_prompt, print_finding
from sheepop.cli.generation_options import Greedy, RepetitionPenalty, Temperature, TopK, TopP
from sheepop.cli.options import Device, Json, Overrides, Quiet, make_console
from sheepop.cli.train import options_of

if TYPE_CHECKING:
    from sheepop.interpret.control.analyses import Analyses
    from sheepop.interpret.control.finding import Finding

app = analyze.app
"""All verbs, of this file and of that one."""

Run = Annotated[Path, typer.Argument(help="A run directory, which sheepop train writes.")]
Step = Annotated[int | None, typer.Option(min=0, help="The step of a checkpoint, instead of the newest.")]
Rate = Annotated[float | None, typer.Option(min=0, help="A learning rate, instead of that of the step.")]
Rows = Annotated[int | None, typer.Option(min=2, help="Rows of the batch to measure on, instead of half of them.")]
Products = Annotated[int, typer.Option(min=2, help="The most products with the Hessian.")]
Try = Annotated[bool, typer.Option("--try", help="Try the first advised change, in a branch of the run.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens to write and to compare.")]
Pairs = Annotated[int, typer.Option(min=1, help="Pairs of texts with shared random numbers.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")]
Batches = Annotated[int, typer.Option(min=2, help="Batches to measure.")]


@at_prompt(app, "decode")
def decode(
    found: Analyses,
    prompt: str,
    length: Length = 48,
    pairs: Pairs = 8,
    greedy: Greedy = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
) -> Finding:
    """Look at generation as a closed loop: how far a change reaches, and whether the text repeats itself.

    Shows how the effect of another token fades in the same text, how long sampled texts stay equal, whether small
    changes of the loop grow, how likely a repeated phrase is to be repeated again, and entropy against temperature.

    Examples:

      sheepop analyze decode runs/quickstart "def main("

      sheepop analyze decode runs/quickstart "def main(" --temperature 0.2 --repetition-penalty 1.1
    """
    from sheepop.generate.config import requested

    settings = requested(
        max_new_tokens=length,
        greedy=greedy,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
    )
    return found.decode(prompt, settings, length=length, pairs=pairs, seed=seed)


@app.command()
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
    from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, sharpness_of

    request = RunAnalysisRequest(run, output, step, learning_rate, device or "auto", overwrite)
    found = analyze_run(request, "sharpness", lambda stopped: sharpness_of(stopped, rows=rows, products=products))
    print_finding(found, output, quiet=quiet, as_json=as_json)


@app.command()
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
    from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, noise_of

    request = RunAnalysisRequest(run, output, step, None, device or "auto", overwrite)
    found = analyze_run(request, "noise", lambda stopped: noise_of(stopped, batches=batches))
    print_finding(found, output, quiet=quiet, as_json=as_json)


@app.command()
def advice(
    run: Run,
    tries: Try = False,
    output: Output = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say what the analysis of a run advises, and try it.

    The run must have been trained with analysis.quantities. With --try the run continues from the newest checkpoint
    that is older than the evidence with the first advised change, into RUN-advised; its held-out loss at the end is
    compared with that of the run as it was.

    Examples:

      sheepop analyze advice runs/diverging

      sheepop analyze advice runs/diverging --try
    """
    from sheepop.jobs.advice import advise

    console = make_console(quiet or as_json)
    found = advise(run, output=output, tries=tries, overwrite=overwrite, console=console)
    print_finding(found, output, quiet=quiet, as_json=as_json)


@app.command()
def rate(
    run: Run,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of the run's steps, for each training.")] = 1.0,
    output: Output = None,
    device: Device = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the learning rate of a run: train its network at rates around its own.

    The search goes downhill in the held-out loss, by half a decade at a time, until the lowest loss has two higher ones
    on either side. That takes five trainings or more. With --share they are shorter, and the schedule of the run is
    shortened in proportion; short trainings bear higher rates than long ones.

    Examples:

      sheepop analyze rate runs/quickstart

      sheepop analyze rate runs/quickstart --share 0.25 --output analysis
    """
    from sheepop.jobs.rates import find_best_rate

    console = make_console(quiet or as_json)
    found = find_best_rate(
        run, share=share, output=output, device=device or "auto", overwrite=overwrite, console=console
    )
    print_finding(found, output, quiet=quiet, as_json=as_json)


@app.command()
def coordinates(
    source: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="A run directory, or a config file.")],
    overrides: Overrides = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="With a config file: a file, folder or corpus; repeatable.")
    ] = None,
    width: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A d_model; repeatable.", show_default="four, up to that of the network"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that each width trains.")] = 5,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="A learning rate.", show_default="that of the run")
    ] = None,
    output: Output = None,
    device: Device = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check whether a learning rate fits other widths: train the network at several, and compare activations.

    Under muP (maximal-update parametrisation) a step changes activations equally at every width. Shows by which factor
    each activation grows for each doubling of the width, before the first step and after the last.

    Examples:

      sheepop analyze coordinates runs/quickstart

      sheepop analyze coordinates recipes/code-bpe.yaml --data notes/ --width 64 --width 128 --width 256
    """
    from sheepop.jobs.coordinates import CoordinatesRequest, check_coordinates

    request = CoordinatesRequest(
        source,
        width or (),
        steps,
        learning_rate,
        output,
        overwrite,
        overrides or (),
        options_of(data, device),
        make_console(quiet or as_json),
    )
    print_finding(check_coordinates(request), output, quiet=quiet, as_json=as_json)
