"""``sheepop scale``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.options import Json, Overrides, Quiet, make_console, print_json
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.scale.page import Scaled


def scale(
    overrides: Overrides = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Your files, or a corpus; repeatable.", show_default="none")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|FLOPS", help="What the large run may cost: 15m, 1h, 1e15flops.", show_default="none"
        ),
    ] = None,
    spend: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|FLOPS", help="What the small runs may cost together.", show_default="a quarter of --budget"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The directory of the family.", show_default="scale")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="WxL,...", help="Sizes of the small runs: 32x2,64x2,96x2.", show_default="by the budget"),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side.", show_default="one on each core")
    ] = None,
    inference: Annotated[
        float, typer.Option(min=0, help="Tokens that the model will read and write; the budget pays for them, too.")
    ] = 0.0,
    repetitions: Annotated[
        float | None,
        typer.Option(
            min=0, help="Repetitions after which text is used up; 0: reading twice helps nothing.", show_default="15.4"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of every random choice.")] = 0,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the family in DIR.", show_default="none")
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Add a finished --run to the family in DIR.", show_default="none"),
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="The run for --learn.", show_default="none")] = None,
    emergence: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Ask --tasks of all models of a family or a run.", show_default="none"),
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="Tasks for --emergence: names, cloze, or files of questions (.jsonl).")
    ] = "copying,brackets,arithmetic",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.", show_default="all")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train small models on your data, fit a scaling law, and find the best large one for a budget.

    Examples:

      sheepop scale --data notes/ --budget 1h --output runs/law

      sheepop scale --resume runs/law

      sheepop scale --learn runs/law --run runs/large

      sheepop scale --emergence runs/law --tasks copying,brackets
    """
    from sheepop.core.budget import Budget
    from sheepop.scale.law import REPETITIONS
    from sheepop.scale.shapes import Shape

    console = make_console(quiet)
    verbs = [name for name, given in (("--resume", resume), ("--learn", learn), ("--emergence", emergence)) if given]
    if len(verbs) > 1:
        raise UsageError(f"{' and '.join(verbs)} are different things to do. Give one of them.")
    if verbs and (data or budget or spend or sizes or output or overrides):
        raise UsageError(f"{verbs[0]} reads the plan in DIR. Leave out --data, --budget, --spend, --sizes, --output.")
    if (run is None) != (learn is None):
        raise UsageError("--learn DIR and --run RUN belong together: a family, and a run to learn from.")
    if emergence is not None:
        from sheepop.jobs.emergence import emergence as emergence_job

        found = emergence_job(emergence, tasks.split(","), limit, seed, console)
        if as_json:
            print_json(found.to_dict())
        elif not quiet:
            typer.echo("\n".join(found.lines()))
        return
    if not verbs and (not data or budget is None):
        raise UsageError("A family needs --data PATH and --budget, such as --budget 1h.")
    wanted = None if budget is None else Budget.of(budget)
    may_spend = None if spend is None else Budget.of(spend, "--spend")
    shapes = [Shape.read(each) for each in sizes.split(",")] if sizes else []
    from sheepop.jobs import scale as job

    beside = None
    if learn is not None and run is not None:
        beside, scaled = job.learn(learn, run, console)
    elif resume is not None:
        scaled = job.resume(resume, console, at_once=at_once)
    else:
        assert wanted is not None
        request = job.ScaleRequest(
            data or [],
            wanted,
            output or Path("scale"),
            may_spend,
            shapes,
            overrides or (),
            at_once,
            REPETITIONS if repetitions is None else repetitions,
            inference,
            seed,
        )
        scaled = job.scale(request, console)
    if as_json:
        print_json(scaled.to_dict())
    elif not quiet:
        if beside is not None:
            place = "inside" if beside.is_inside else "outside"
            typer.echo(
                f"{beside.name}: loss {beside.loss:.4f}, predicted {beside.predicted:.4f} "
                f"({beside.low:.4f} to {beside.high:.4f}): {place} the interval."
            )
        _print(scaled, learn or resume or output or Path("scale"))


def _print(scaled: Scaled, directory: Path) -> None:
    from sheepop.scale.page import PAGE, RUN

    law, found = scaled.fit.law, scaled.recommended
    loss, low, high = (each * found.bits for each in found.loss)
    typer.echo(f"Law: {law.E:.3g} + {law.A:.3g} / N^{law.alpha:.3f} + {law.B:.3g} / D^{law.beta:.3f}")
    typer.echo(
        f"For {scaled.family.budget.words}: {found.shape}, {found.parameters:,.0f} parameters that multiply a token "
        f"(best number, 95 percent: {found.between[0]:,.0f} to {found.between[1]:,.0f}), {found.tokens:,.0f} tokens"
    )
    typer.echo(f"Rows of a step: {found.rows}, learning rate: {found.learning_rate}")
    typer.echo(f"Predicted: {loss:.3f} bits per byte ({low:.3f} to {high:.3f})")
    for note in scaled.notes:
        typer.echo(note)
    typer.echo(f"Report: {directory / PAGE}")
    typer.echo(f"Next: sheepop train --config {directory / RUN} --output runs/large")
