"""Starting or resuming a run as it is asked for, on the command line or in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.data.discovery import require_paths
from sheepop.jobs.config import SheepOpConfig, load_config, read_settings
from sheepop.jobs.layout import check_layout, require_agreement
from sheepop.jobs.recipe import complete, draft
from sheepop.jobs.resume import find_resumable, why_no_run
from sheepop.jobs.run_record import Request, StoredRun
from sheepop.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from sheepop.jobs.train import TrainOutcome


def start(
    options: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    config: Path | None = None,
    output: Path | None = None,
    resume: str | None = None,
    fork: Path | None = None,
    overwrite: bool = False,
    console: Console,
    command: str | None = None,
    profile_steps: int | None = None,
    ranks: Ranks = ALONE,
) -> TrainOutcome:
    """Starts or resumes a run of whatever kind its settings are, to its end.

    `options` is a tree of settings that win over those of the file `config`; ``key=value`` `overrides` win over both.
    What they leave open is chosen by the recipe. `resume` is ``auto``, for the run at `output` if there is one, or the
    path of a run. Raises `UsageError` where these contradict each other, and what `sheepop.jobs.train` raises.

    With several `ranks` all of them call this with the same arguments, and the first decides.
    """
    if ranks.restarts and resume is None:
        resume, overwrite = "auto", False
    with ranks.together():
        asked = asked_for(options, overrides, config, output, resume, fork, overwrite=overwrite, ranks=ranks)
        given, settings, stored, request = asked.given, asked.settings, asked.stored, Request(command)
        if stored is None and settings.output_dir is not None and ranks.is_first:
            RunDirectory(Path(settings.output_dir)).require_place(overwrite or resume is not None)
    # These load torch, which nothing above needs.
    from sheepop.jobs.bench import training_speed
    from sheepop.jobs.train import train

    with ranks.together():
        if stored is None and ranks.is_first:
            completed = complete(given, training_speed, console, fork=fork)
            settings, request = completed.config, Request(command, completed.chosen)
    return train(
        settings,
        resume=resume is not None,
        overwrite=overwrite,
        fork=fork,
        console=console,
        request=request,
        profile_steps=profile_steps,
        ranks=ranks,
    )


@dataclass(frozen=True)
class Asked:
    """What was given, as settings, and the run at their place where one goes on."""

    given: dict[str, Any]
    settings: SheepOpConfig
    stored: StoredRun | None


def asked_for(
    options: dict[str, Any],
    overrides: Sequence[str],
    config: Path | None,
    output: Path | None,
    resume: str | None,
    fork: Path | None,
    *,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
) -> Asked:
    """The settings of `start`, before anything is chosen or measured; raises for those that cannot be."""
    path = _run_path(output, resume, overwrite)
    if path is not None:
        options = {**options, "output_dir": str(path)}
    given = read_settings(config, overrides, options=options)
    require_agreement(ranks, given)
    settings = draft(given, keeps_model=fork is not None)
    check_layout(settings, ranks)
    require_paths(Path(place) for place in options.get("data", {}).get("paths", ()) if "://" not in place)
    stored = find_resumable(Path(settings.output_dir)) if resume is not None and settings.output_dir else None
    if resume == "auto" and settings.output_dir is None:
        raise UsageError("--resume auto needs the run directory: give --output DIR.")
    if stored is not None:
        settings = load_config(config, overrides, base=stored.record.asked, options=options)
    return Asked(given, settings, stored)


def _run_path(output: Path | None, resume: str | None, overwrite: bool) -> Path | None:
    """The run directory that is named, if any; raises `UsageError` where the names contradict each other."""
    if resume is not None and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it; give only one of them.")
    if resume is None or resume == "auto":
        return output
    path = Path(resume)
    if output is not None and output != path:
        raise UsageError(f"--resume names {resume} and --output names {output}; give only one of them.")
    if find_resumable(path) is None:
        raise UsageError(why_no_run(path))
    return path
