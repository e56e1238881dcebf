"""The advice of a run's analysis, and a trial of it beside the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.files import write_json
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import Advice, advice_of
from sheepop.interpret.control.finding import Finding, columns
from sheepop.interpret.pictures import Picture, panel, plain
from sheepop.jobs.analyze import require_no_result, write_finding
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.trial import Trial, try_advice
from sheepop.report.palette import TRAIN, VALIDATION


@dataclass(frozen=True, eq=False)
class AdviceFinding(Finding):
    """The advice of a run's analysis, most urgent first, and the trial of the first advised change of a setting.

    `measured` are the rows of the analysis, as the run's metrics have them.
    """

    verb: ClassVar[str] = "advice"
    measured: Sequence[Mapping[str, Any]]
    advice: Sequence[Advice]
    trial: Trial | None

    def table(self) -> list[str]:
        """The causes, and the losses of a trial."""
        lines = columns(("Cause", "since step"), [(each.cause, f"{each.step:,}") for each in self.advice])
        if self.trial is not None:
            arms = (("as it was", self.trial.as_it_was), ("as advised", self.trial.as_advised))
            losses = [(name, "none" if arm.loss is None else f"{arm.loss:.4f}") for name, arm in arms]
            lines += ["", *columns(("Run", "held-out loss"), losses)]
        return lines

    def sentences(self) -> list[str]:
        """The advice, and whether it helped."""
        lines = [each.words for each in self.advice] or ["The analysis of this run gives no advice."]
        return lines if self.trial is None else [*lines, *self.trial.sentences()]

    def pictures(self) -> Iterator[Picture]:
        """The losses of both runs of a trial, which part at the step of the checkpoint."""
        if self.trial is None:
            return
        figure, axes = panel(7, 4, "The run as it was and as advised")
        arms = (("as it was", self.trial.as_it_was, VALIDATION), ("as advised", self.trial.as_advised, TRAIN))
        for name, arm, colour in arms:
            rows = read_json_lines(RunDirectory(arm.run).metrics_file).rows
            trained = [row for row in rows if row.get("split") == "train"]
            steps, losses = ([row[key] for row in trained] for key in ("step", "loss"))
            axes.plot(steps, losses, color=colour, linewidth=1.4, label=name)
        axes.axvline(self.trial.begin, color="#848b94", linestyle="--", linewidth=1, label="the checkpoint")
        axes.set(xlabel="Step", ylabel="Loss, nats per token")
        axes.legend(frameon=False, fontsize=8)
        plain(axes)
        yield Picture("advice", figure, {})

    def numbers(self) -> dict[str, Any]:
        """The advice, its trial, and how often the run was measured."""
        trial = None if self.trial is None else self.trial.to_dict()
        return {"advice": [vars(each) for each in self.advice], "trial": trial, "measured": list(self.measured)}


def advise(
    run: Path,
    *,
    output: Path | None = None,
    tries: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> AdviceFinding:
    """The advice of the run at `run`; with `tries`, the first advised change is tried as `try_advice` does.

    The outcome of a trial is kept in its run, as ``advice.json``. Raises `UsageError` for a path without a run, a run
    without an analysis, or advice without a change to try.
    """
    require_no_result(output, AdviceFinding.verb, overwrite=overwrite)
    stored = find_resumable(run)
    if stored is None:
        raise UsageError(f"{run} is not a training run. Give a run directory, which `sheepop train` writes.")
    rows = read_json_lines(RunDirectory(run).metrics_file).rows
    measured = [row for row in rows if row.get("split") == "analysis"]
    if not measured:
        raise UsageError(
            f"{run} measured nothing while it trained. To see how stable a run is, turn measurements on when you start "
            "it: sheepop train ... analysis.quantities=[sharpness,noise,layers]"
        )
    advice = advice_of(rows)
    trial = None
    if tries:
        chosen = next((each for each in advice if each.changes), None)
        if chosen is None:
            raise UsageError("There is no advised change of a setting to try.")
        trial = try_advice(run, stored, chosen, overwrite=overwrite, console=console or Console.silent())
    found = AdviceFinding((), measured, advice, trial)
    if trial is not None:
        write_json(RunDirectory(trial.as_advised.run).advice, found.to_dict())
    if output is not None:
        write_finding(found, output)
    return found
