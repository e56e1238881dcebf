"""The advice of a run's analysis, and a trial of it: the same run again with the advised change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import merge
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.files import write_json
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import Advice, advice_of
from sheepop.interpret.control.finding import Finding, columns, said
from sheepop.jobs.analyze import require_no_result, write_finding
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.run.record import StoredRun
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.report import number


@dataclass(frozen=True)
class Trial:
    """A run with the advised `settings`, and the held-out losses of both in nats per token, if they were scored."""

    run: Path
    settings: Mapping[str, Any]
    before: float | None
    after: float | None


@dataclass(frozen=True, eq=False)
class AdviceFinding(Finding):
    """The advice of a run's analysis, most urgent first, and the trial of the first one that changes a setting.

    `measured` are the rows of the analysis, as the run's metrics have them.
    """

    verb: ClassVar[str] = "advice"
    measured: Sequence[Mapping[str, Any]]
    advice: Sequence[Advice]
    trial: Trial | None

    def table(self) -> list[str]:
        """The causes, and the losses of a trial."""
        rows = [(each.cause, f"{each.step:,}") for each in self.advice]
        lines = columns(("Cause", "since step"), rows)
        if self.trial is not None:
            losses = [
                (name, "not scored" if loss is None else f"{loss:.4f}")
                for name, loss in (("as it was", self.trial.before), ("as advised", self.trial.after))
            ]
            lines += ["", *columns(("Run", "held-out loss"), losses)]
        return lines

    def sentences(self) -> list[str]:
        """The advice, and whether it helped."""
        lines = [each.words for each in self.advice] or ["The analysis of this run gives no advice."]
        if self.trial is not None:
            given = ", ".join(f"{key}={value}" for key, value in self.trial.settings.items())
            lines.append(f"The run with {given} is in {self.trial.run}.{self._verdict()}")
        return lines

    def _verdict(self) -> str:
        assert self.trial is not None
        before, after = self.trial.before, self.trial.after
        if before is None or after is None:
            return ""
        verdict = "helped" if after < before else "did not help"
        return f" The advice {verdict}: the held-out loss is {after / before - 1:+.1%}."

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        trial = None if self.trial is None else {**vars(self.trial), "run": str(self.trial.run)}
        numbers = {"advice": [vars(each) for each in self.advice], "trial": trial, "measured": list(self.measured)}
        return said(self, numbers)


def advise(
    run: Path,
    *,
    output: Path | None = None,
    tries: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> AdviceFinding:
    """The advice of the run at `run`; with `tries`, trains it again with the first advised change beside it.

    The trial has the same data, seed and steps, and is kept in ``RUN-advised`` with its outcome, ``advice.json``.
    Raises `UsageError` for a path without a run, a run without an analysis, or advice without a change to try.
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
        trial = _try(run, stored, chosen, rows, overwrite, console or Console.silent())
    found = AdviceFinding((), measured, advice, trial)
    if trial is not None:
        write_json(RunDirectory(trial.run).advice, found.to_dict())
    if output is not None:
        write_finding(found, output)
    return found


def advised_settings(config: SheepOpConfig, advice: Advice) -> dict[str, Any]:
    """The settings of `advice` for a run with these: a rate is multiplied, and a batch has whole micro-batches."""
    settings = dict(advice.changes)
    if (factor := settings.get("training.learning_rate")) is not None:
        rate = config.training.learning_rate * factor
        settings["training.learning_rate"] = float(f"{rate:.3g}")
        if config.training.min_learning_rate > rate:
            settings["training.min_learning_rate"] = 0.0
    if (rows := settings.get("training.global_batch_size")) is not None:
        micro = config.training.micro_batch_size or 1
        settings["training.global_batch_size"] = micro * max(1, round(rows / micro))
    return settings


def _try(
    run: Path, stored: StoredRun, advice: Advice, rows: Sequence[Mapping[str, Any]], overwrite: bool, console: Console
) -> Trial:
    settings, place = advised_settings(stored.config, advice), run.resolve().with_name(f"{run.resolve().name}-advised")
    tree: dict[str, Any] = {}
    for key, value in {**settings, "output_dir": str(place)}.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merge(tree, value)
    origin = stored.record.forked_from
    request = RunRequest(
        merge(stored.config.model_dump(mode="json"), tree),
        uses_recipe=False,
        overwrite=overwrite,
        fork=None if origin is None else Path(str(origin["path"])),
        console=console,
    )
    outcome = train(request)
    score: Mapping[str, Any] = next((row for row in reversed(rows) if row.get("split") == "score"), {})
    return Trial(
        place, settings, number(score.get("loss")), outcome.scores.loss if outcome.scores is not None else None
    )
