"""``sheepop plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sheepop.cli.options import (
    MODEL,
    ConfigFile,
    Device,
    Json,
    Overrides,
    Quiet,
    make_console,
    print_json,
)
from sheepop.core.errors import UsageError
from sheepop.core.facts import visible_line

_ENDS = 1


def plan(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help=f"The model to start from, if there is one. {MODEL}")
    ] = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="A file, folder or corpus directory; repeatable.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run directory to be.", show_default="runs/<date>")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Post-training: sft, dpo, reward, ppo, grpo or distill.", show_default="none"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="How much to spend: 24h, 1e18flops or 50usd.", show_default="none"),
    ] = None,
    machine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="this, a100xN, h100xN or h200xN for N GPUs, or a YAML file.")
    ] = "this",
    price: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="USD", help="Price of the machine for an hour.", show_default="of its kind"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long to time steps.")] = 15.0,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="Also write the plan as a page.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="The run replaces one at --run.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find out before a run what would end it, what it needs, how long it takes and what it costs.

    The exit code is 1 if something would end the run. For this machine it takes the first steps of the run in a
    temporary directory; for another one it counts, and chooses the layout over its GPUs.

    Examples:

      sheepop plan --data notes/ --run runs/notes training.max_epochs=3

      sheepop plan --config run.yaml --budget 24h --output plan.html

      sheepop plan --config run.yaml --machine h100x8 --budget 50usd

      sheepop plan models/base --method sft --data chats.jsonl tuning.lora.rank=8
    """
    if model is not None and "=" in str(model) and not model.exists():  # a setting, and no model
        overrides, model = [str(model), *(overrides or ())], None
    if output is not None and output.suffix != ".html":
        raise UsageError(f"--output {output} needs a name that ends in .html.")
    from sheepop.core.budget import Budget
    from sheepop.plan.machine import find_machine

    spends = None if budget is None else Budget.of(budget)
    there = find_machine(machine)
    if model is None and method is not None:
        raise UsageError(f"--method {method} teaches a finished model: sheepop plan MODEL --method {method}")
    from sheepop.cli.train import options_of
    from sheepop.jobs.run.request import RunRequest

    options: dict[str, Any] = options_of(data, device)
    if method is not None:
        options["tuning"] = {"method": method}
    request = RunRequest.of(
        options,
        overrides=overrides or (),
        config=config,
        output=run,
        fork=model,
        overwrite=overwrite,
        console=make_console(quiet or as_json),
    )
    _ = request.settings  # refuses what is no setting before torch is loaded
    from sheepop.jobs.plan import plan_a_run

    found = plan_a_run(request, budget=spends, machine=there, price=price, seconds=seconds)
    if output is not None:
        found.page().write(output)
    if as_json:
        print_json(found.to_dict())
    else:
        for line in found.lines():
            typer.echo(visible_line(line))
        if output is not None:
            typer.echo(f"Page: {output}")
    if found.ends:
        raise typer.Exit(_ENDS)
