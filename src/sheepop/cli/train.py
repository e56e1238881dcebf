"""``sheepop train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.options import (
    ConfigFile,
    Device,
    Exportable,
    Json,
    Overrides,
    OverwriteRun,
    Quiet,
    Resume,
    RunOutput,
    make_console,
    print_json,
    typed_command,
)
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.jobs.run.train import TrainOutcome

_PROFILE_STEPS = 5


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="A file, folder or corpus directory; repeatable.")
    ] = None,
    output: RunOutput = None,
    device: Device = None,
    resume: Resume = None,
    fork: Annotated[
        Path | None,
        typer.Option(
            "--fork", metavar="MODEL", help="Start a new run from the weights of this model, run or checkpoint."
        ),
    ] = None,
    exportable: Exportable = False,
    overwrite: OverwriteRun = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a few steps and list their most expensive operations.")
    ] = False,
    profile_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps that --profile records.", show_default=str(_PROFILE_STEPS))
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option("--find-learning-rate", help="Test increasing learning rates and suggest one; starts no run."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model on files.

    Examples:

      sheepop train --data notes/ --output runs/notes training.max_minutes=10

      sheepop train --data book.txt --config config.json --device cpu

      sheepop train --resume runs/notes

      sheepop train --fork runs/notes --data letters/ --output runs/letters training.learning_rate=1e-4

      sheepop train --data notes/ --find-learning-rate

      sheepop train --data notes/ --output runs/notes --profile
    """
    if find_rate and (resume is not None or fork is not None or overwrite or profile):
        raise UsageError(
            "--find-learning-rate starts no run, so it cannot be combined with --resume, --fork, --overwrite or "
            "--profile."
        )
    if resume is not None and fork is not None:
        raise UsageError("--resume continues a run and --fork starts a new one; give only one of them.")
    if exportable and fork is not None:
        raise UsageError("--exportable chooses the parts of a new model, and --fork keeps those of another; give one.")
    if profile_steps is not None and not profile:
        raise UsageError("--profile-steps says how many steps --profile records; add --profile.")
    options = options_of(data, device)
    if exportable:
        from sheepop.jobs.recipe import EXPORTABLE

        options["model"] = EXPORTABLE
    if find_rate:
        _find_rate(config, overrides or (), output, options, quiet, as_json)
        return
    run_command(
        options,
        overrides=overrides or (),
        config=config,
        output=output,
        resume=resume,
        fork=fork,
        overwrite=overwrite,
        profile_steps=(profile_steps or _PROFILE_STEPS) if profile else None,
        quiet=quiet,
        as_json=as_json,
    )


def options_of(data: Sequence[Path] | None, device: str | None) -> dict[str, Any]:
    """The tree of settings from ``--data`` and ``--device``."""
    found: dict[str, Any] = {}
    if data:
        found["data"] = {"paths": [str(path) for path in data]}
    if device is not None:
        found["device"] = device
    return found


def run_command(options: dict[str, Any], *, quiet: bool, as_json: bool, **request: Any) -> None:
    """Starts or resumes a run of any kind and prints the outcome.

    `options` is the tree of settings from the command's options; `request` has the other arguments of `RunRequest.of`.
    """
    from sheepop.jobs.run.request import RunRequest
    from sheepop.jobs.run.train import train
    from sheepop.parallel.ranks import Ranks

    with Ranks.joined() as ranks:
        requested = RunRequest.of(options, ranks=ranks, console=make_console(quiet), command=typed_command(), **request)
        outcome = train(requested)
    if not ranks.is_first:
        return
    if as_json:
        print_json(_result(outcome))
    elif not quiet:
        _print_outcome(outcome)


def _result(outcome: TrainOutcome) -> dict[str, Any]:
    scores, before = outcome.scores, outcome.before
    measured = scores.metrics() if scores else {}
    return {
        **measured,
        **{f"{name}_before": before[name] for name in measured if name in before},
        "run": str(outcome.run),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "best_step": outcome.best_step,
        "ended": "early_stopping" if outcome.ended_early else "max_steps",
        **({f"held_out_{name}": count for name, count in scores.counts().items()} if scores else {}),
    }


def _print_outcome(outcome: TrainOutcome) -> None:
    from sheepop.checkpoint import RunDirectory
    from sheepop.jobs.run.record import RunRecord, repeat_command

    early = ", stopped early because the held-out loss no longer improved" if outcome.ended_early else ""
    typer.echo(f"Done: {outcome.run}{early}")
    if outcome.scores is not None:
        typer.echo(f"Held out, step {outcome.best_step:,}: {outcome.scores}")
        if outcome.before:
            name = "reward" if "reward" in outcome.before else "loss"
            typer.echo(f"Before, at step 0: {name} {outcome.before[name]:.4f}")
    for words in outcome.advice:
        typer.echo(words)
    typer.echo(f"Report: {outcome.report}")
    typer.echo(f"Repeat: {repeat_command(outcome.run, RunRecord.read(RunDirectory(outcome.run)))}")
    typer.echo(f"Next: {outcome.try_out}")


def _find_rate(
    config: Path | None, overrides: Sequence[str], output: Path | None, options: dict[str, Any], quiet: bool, json: bool
) -> None:
    """Runs the range test of ``--find-learning-rate``."""
    from sheepop.jobs.run.request import RunRequest
    from sheepop.parallel.ranks import Ranks

    with Ranks.joined() as ranks:
        request = RunRequest.of(
            options, overrides=overrides, config=config, output=output, ranks=ranks, console=make_console(quiet)
        )
        request.check()
        from sheepop.jobs.learning_rate import PICTURE, find_rate

        found = find_rate(request)
    test = found.test
    if json:
        summary = {"suggestion": test.suggestion, "lowest": test.lowest, "diverged": test.diverged}
        print_json({"directory": str(found.directory), **summary})
        return
    typer.echo(f"Suggested: training.learning_rate={test.suggestion:.1e}")
    if not quiet:
        end = f"diverged at {test.diverged:.1e}" if test.diverged else "did not diverge"
        typer.echo(f"The loss fell fastest there, was lowest at {test.lowest:.1e} and {end}.")
        typer.echo(f"Picture: {found.directory / PICTURE}")
