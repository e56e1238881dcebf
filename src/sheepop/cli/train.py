"""``sheepop train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.options import (
    ConfigFile,
    Device,
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
    from sheepop.jobs.train import TrainOutcome

_PROFILE_STEPS = 5


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="A file, folder or corpus directory; may be repeated.")
    ] = None,
    output: RunOutput = None,
    device: Device = None,
    resume: Resume = None,
    fork: Annotated[
        Path | None,
        typer.Option(
            "--fork", metavar="PATH", help="Start a new run from the weights of this run, checkpoint or model."
        ),
    ] = None,
    overwrite: OverwriteRun = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace a few steps and list their most expensive operations.")
    ] = False,
    profile_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps that --profile records.", show_default=str(_PROFILE_STEPS))
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-learning-rate", help="Try higher and higher learning rates and suggest one; starts no run."
        ),
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
    if profile_steps is not None and not profile:
        raise UsageError("--profile-steps says how many steps --profile records; add --profile.")
    options = options_of(data, device)
    if find_rate:
        if output is not None:
            options["output_dir"] = str(output)
        _find_rate(config, overrides or (), options, quiet, as_json)
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
    """The tree of settings that ``--data`` and ``--device`` stand for."""
    found: dict[str, Any] = {}
    if data:
        found["data"] = {"paths": [str(path) for path in data]}
    if device is not None:
        found["device"] = device
    return found


def run_command(
    options: dict[str, Any],
    *,
    overrides: Sequence[str],
    config: Path | None,
    output: Path | None,
    resume: str | None,
    fork: Path | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    profile_steps: int | None = None,
) -> None:
    """Starts or resumes a run, of whatever kind its settings are, and prints what came of it.

    `options` is the tree of what the options of the command set, `resume` what ``--resume`` was given.
    """
    from sheepop.jobs.start import start
    from sheepop.parallel.ranks import Ranks

    with Ranks.joined() as ranks:
        outcome = start(
            options,
            overrides=overrides,
            config=config,
            output=output,
            resume=resume,
            fork=fork,
            overwrite=overwrite,
            console=make_console(quiet),
            command=typed_command(),
            profile_steps=profile_steps,
            ranks=ranks,
        )
    if not ranks.is_first:
        return
    if as_json:
        print_json(_result(outcome))
    elif not quiet:
        _print_outcome(outcome)


def _result(outcome: TrainOutcome) -> dict[str, Any]:
    scores = outcome.scores
    return {
        **(scores.metrics() if scores else {}),
        "run": str(outcome.run),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "best_step": outcome.best_step,
        "ended": "early_stopping" if outcome.ended_early else "max_steps",
        **({f"held_out_{name}": count for name, count in scores.counts().items()} if scores else {}),
    }


def _print_outcome(outcome: TrainOutcome) -> None:
    from sheepop.checkpoint import RunDirectory
    from sheepop.jobs.run_record import RunRecord, repeat_command

    early = ", stopped early because the held-out loss no longer improved" if outcome.ended_early else ""
    typer.echo(f"Done: {outcome.run}{early}")
    if outcome.scores is not None:
        typer.echo(f"Held out, step {outcome.best_step:,}: {outcome.scores}")
    typer.echo(f"Report: {outcome.report}")
    typer.echo(f"Repeat: {repeat_command(outcome.run, RunRecord.read(RunDirectory(outcome.run)))}")
    typer.echo(f"Next: {outcome.try_out}")


def _find_rate(
    config: Path | None, overrides: Sequence[str], options: dict[str, Any], quiet: bool, as_json: bool
) -> None:
    """The range test of ``--find-learning-rate``."""
    from sheepop.data.discovery import require_paths
    from sheepop.jobs.config import read_settings
    from sheepop.jobs.recipe import draft

    given = read_settings(config, overrides, options=options)
    draft(given)
    require_paths(Path(path) for path in options.get("data", {}).get("paths", ()) if "://" not in path)
    from sheepop.jobs.bench import training_speed
    from sheepop.jobs.learning_rate import PICTURE, find_rate
    from sheepop.jobs.recipe import complete

    console = make_console(quiet)
    found = find_rate(complete(given, training_speed, console).config, console=console)
    test = found.test
    if as_json:
        summary = {"suggestion": test.suggestion, "lowest": test.lowest, "diverged": test.diverged}
        print_json({"directory": str(found.directory), **summary})
        return
    typer.echo(f"Suggested: training.learning_rate={test.suggestion:.1e}")
    if not quiet:
        end = f"diverged at {test.diverged:.1e}" if test.diverged else "did not diverge"
        typer.echo(f"The loss fell fastest there, was lowest at {test.lowest:.1e} and {end}.")
        typer.echo(f"Picture: {found.directory / PICTURE}")
