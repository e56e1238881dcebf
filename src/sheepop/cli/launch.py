"""``sheepop launch``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli import train
from sheepop.cli.options import make_console
from sheepop.core.console import Console
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.jobs.launch import Launch

_SHARED = (["perplexity"], ["tasks"], ["code"])


class Engine(StrEnum):
    """The ways to start the processes."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


def launch(
    command: Annotated[list[str], typer.Argument(metavar="train|eval ...", help="The command with all its options.")],
    engine: Annotated[Engine, typer.Option(help="How to start the processes.")] = Engine.local,
    processes: Annotated[
        int | None, typer.Option("--processes", "-n", min=1, help="Processes per machine.", show_default="one per GPU")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, help="Number of machines, with --engine slurm or ray.")] = 1,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often to restart from the last checkpoint after a process was lost.")
    ] = 0,
    prints: Annotated[bool, typer.Option("--print", help="Print what would be run, and run nothing.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE.png",
            help="Print what each process would hold and send, draw the layout to a file, and run nothing.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Train or evaluate on several processes or machines.

    Give the options of launch before the command, and the options of the command after it.

    Examples:

      sheepop launch -n 2 train --data notes/ --output runs/notes --device cpu

      sheepop launch --restarts 3 train --data notes/ --output runs/notes parallel.zero=3

      sheepop launch --engine slurm --machines 4 -n 8 --print train --config run.yaml --output runs/large

      sheepop launch --engine ray -n 2 train --data notes/ --output runs/notes --device cpu

      sheepop launch -n 8 --plan layout.png train --config run.yaml parallel.tensor=2

      sheepop launch -n 4 eval tasks runs/notes --tasks hellaswag
    """
    trains = command[0] == "train"
    if not trains and (command[0] != "eval" or command[1:2] not in _SHARED):
        words = " ".join(command[: 2 if command[0] == "eval" else 1])
        raise UsageError(
            f"sheepop {words} runs in one process. Only train, and eval perplexity, tasks and code run in several."
        )
    if restarts and not trains:
        raise UsageError("An evaluation has no checkpoint to restart from. Leave out --restarts.")
    if plan is not None and not trains:
        raise UsageError("--plan is only for train.")
    if plan is not None and (prints or plan.suffix != ".png"):
        raise UsageError("--plan needs a file name FILE.png, and cannot be combined with --print.")
    if machines > 1 and engine is Engine.local and plan is None:
        raise UsageError("--engine local uses only this machine. Use --engine slurm or ray for several machines.")
    from sheepop.jobs.launch import Launch, run_on_ray, run_on_this_machine, submit_to_slurm

    gpus = 0
    if "cpu" not in (_value(command, "--device"), _value(command, "device")):
        import torch

        gpus = torch.cuda.device_count()
    if processes is None and not gpus:
        raise UsageError("No GPU was found. Give the number of processes: --processes N.")
    made = Launch(
        _with_output(command) if trains else command, processes or gpus, machines, restarts, has_gpus=gpus > 0
    )
    if plan is not None:
        _plan(made, plan)
        return
    if engine is Engine.slurm:
        typer.echo(made.slurm() if prints else submit_to_slurm(made), nl=not prints)
        return
    if prints:
        if engine is Engine.ray:
            raise UsageError("--engine ray starts the processes itself, so there is nothing to print.")
        typer.echo(made.local())
        return
    code = run_on_ray(made) if engine is Engine.ray else run_on_this_machine(made, Console())
    if code:
        raise SystemExit(code)


def _plan(launch: Launch, picture: Path) -> None:
    """Prints and draws the layout of the command over the ranks of the launch."""
    given = _parsed(launch.command)
    from sheepop.jobs.run.plan import plan_run
    from sheepop.jobs.run.request import RunRequest
    from sheepop.parallel.ranks import Ranks

    found = plan_run(
        RunRequest.of(
            train.options_of(given["data"], given["device"]),
            overrides=given["overrides"] or (),
            config=given["config"],
            output=given["output"],
            resume=given["resume"],
            fork=given["fork"],
            ranks=Ranks(0, launch.processes * launch.machines),
            console=make_console(given["quiet"]),
        )
    )
    found.draw(picture)
    typer.echo(f"Layout: {found.words}")
    for words in found.assumed:
        typer.echo(words)
    typer.echo(f"Picture: {picture}")


def _parsed(command: Sequence[str]) -> dict[str, Any]:
    """The arguments of ``train``, as that command parses them."""
    app = typer.Typer(add_completion=False)
    app.command("train")(train.train)
    return typer.main.get_command(app).make_context("train", list(command[1:])).params


def _with_output(command: list[str]) -> list[str]:
    """Adds a run directory to a command without one, because all ranks must know it, also after a restart."""
    from sheepop.jobs.config import read_settings

    given = _parsed(command)
    if given["output"] is not None or given["resume"] not in (None, "auto"):
        return command
    if read_settings(given["config"], given["overrides"] or ()).get("output_dir") is not None:
        return command
    return [*command, "--output", f"runs/{datetime.now(UTC).astimezone().strftime('%Y-%m-%d-%H%M%S')}"]


def _value(command: list[str], name: str) -> str | None:
    """The value of an option or setting in the command, written as one word or as two."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        key, _, value = word.partition("=")
        if key == name:
            return value or following
    return None
