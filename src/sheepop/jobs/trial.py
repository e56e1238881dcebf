"""A trial of advice: a run continues from one of its checkpoints as it was and as advised, and both are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.checkpoint.run_directory import STATE
from sheepop.core.config import value_text
from sheepop.core.console import Console
from sheepop.core.errors import DataError, TrainingError
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Batches
from sheepop.evaluate.statistics import Difference, paired_bootstrap
from sheepop.interpret.control.advice import Advice
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.branch import changed, write_branch
from sheepop.jobs.run.open import followed
from sheepop.jobs.run.record import StageTimes, StoredRun
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.jobs.run.train import train
from sheepop.model import IGNORE_INDEX, Transformer
from sheepop.train.precision import autocast
from sheepop.train.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from sheepop.jobs.task import Task

# Both runs take all steps, whatever their losses and the clock.
_WHOLE: Mapping[str, Any] = {
    "training.early_stopping": None,
    "training.early_stopping_delta": 0.0,
    "training.max_minutes": None,
}


@dataclass(frozen=True)
class Arm:
    """One of the two runs of a trial, with its held-out loss in nats per token after the last step.

    The loss is None if nothing is held out, or if the run failed: `failure` is the error with which it ended, or says
    since which step its losses are not finite.
    """

    run: Path
    loss: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Trial:
    """Both runs of a trial, which go from the checkpoint of step `begin` to step `end`; `why` they begin at step 0.

    `settings` are those of the run as advised. `difference` is its loss minus that of the run as it was, over the same
    held-out rows; None if one of them has no loss.
    """

    settings: Mapping[str, Any]
    begin: int
    end: int
    why: str | None
    as_it_was: Arm
    as_advised: Arm
    difference: Difference | None

    def sentences(self) -> list[str]:
        """What was tried, and what came of it."""
        given = ", ".join(f"{key}={value_text(value)}" for key, value in self.settings.items())
        begin = f"from the checkpoint of step {self.begin:,}" if self.why is None else "from the beginning"
        rows = (
            "with more rows in each step as advised"
            if "training.global_batch_size" in self.settings
            else "on the same rows in the same order"
        )
        lines = [] if self.why is None else [f"{self.why}, so both runs start from the beginning."]
        lines.append(
            f"Tried {begin} to step {self.end:,}, {rows}: as it was in {self.as_it_was.run}, and with {given} in "
            f"{self.as_advised.run}."
        )
        for name, arm in (("as it was", self.as_it_was), ("as advised", self.as_advised)):
            if arm.failure is not None:
                lines.append(f"The run {name} fails: {arm.failure}")
        return [*lines, *self._verdict()]

    def _verdict(self) -> list[str]:
        if self.difference is None:
            has_failed = [arm.failure is not None for arm in (self.as_it_was, self.as_advised)]
            if has_failed == [True, False]:
                return ["The advice helped: the run as advised reaches its end."]
            if any(has_failed):
                return ["The advice did not help."]
            return ["Nothing is held out, so the losses cannot be compared."]
        value, (low, high) = self.difference.value, self.difference.interval
        words = "lower" if value < 0 else "higher"
        near, far = sorted((abs(low), abs(high)))
        if low <= 0 <= high:
            return [
                f"The advice makes no clear difference: the held-out loss changes by {value:+.4f} nats per token, and "
                f"the interval of 95 percent is {low:+.4f} to {high:+.4f}."
            ]
        return [
            f"The advice {'helped' if value < 0 else 'did not help'}: the held-out loss is {words} by "
            f"{abs(value):.4f} nats per token (95 percent: {near:.4f} to {far:.4f})."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        found = asdict(self)
        for name in ("as_it_was", "as_advised"):
            found[name]["run"] = str(found[name]["run"])
        return found


def advised_settings(config: SheepOpConfig, advice: Advice) -> dict[str, Any]:
    """The settings of `advice` for a run with these: a rate is multiplied, and a batch has whole micro-batches."""
    settings, training = dict(advice.changes), config.training
    if (factor := settings.get("training.learning_rate")) is not None:
        rate = training.learning_rate * factor
        settings["training.learning_rate"] = float(f"{rate:.3g}")
        if training.min_learning_rate > rate:
            settings["training.min_learning_rate"] = 0.0
    if (rows := settings.get("training.global_batch_size")) is not None:
        micro = training.micro_batch_size or 1
        settings["training.global_batch_size"] = micro * max(1, round(rows / micro))
    if (layers := settings.get("training.layers")) is not None:
        settings["training.layers"] = [*layers, *(each.model_dump() for each in training.layers)]
    return settings


def try_advice(run: Path, stored: StoredRun, advice: Advice, *, overwrite: bool, console: Console) -> Trial:
    """Tries `advice` from the newest checkpoint that is older than its evidence; without one, from the beginning.

    The run as advised is kept in ``RUN-advised``. The run as it was is `run` itself if it took all its steps, because a
    run that continues from a checkpoint is the same bit for bit; otherwise it is continued in ``RUN-as-it-was``.
    """
    directory, settings = RunDirectory(run), advised_settings(stored.config, advice)
    end = stored.config.training.resolved().total_steps
    older = [step for step in directory.steps() if step < advice.step and (directory.checkpoint(step) / STATE).is_dir()]
    start, why = max(older, default=None), None
    if any(key.startswith("model.") for key in settings):
        start, why = None, f"{next(iter(settings))} changes the network, and the weights of a checkpoint do not fit it"
    elif start is None:
        why = f"The run has no checkpoint from before step {advice.step:,} with the state of its optimizer"

    def taken(name: str, given: Mapping[str, Any]) -> Arm:
        if not given and end in directory.steps():
            return Arm(run)
        here, place = Path.cwd(), run.resolve().with_name(f"{run.resolve().name}-{name}")
        place = place.relative_to(here) if place.is_relative_to(here) else place
        try:
            _take(stored, directory, start, {**_WHOLE, **given}, RunDirectory(place), overwrite, console)
        except TrainingError as error:
            return Arm(place, failure=str(error))
        return Arm(place)

    arms = taken("as-it-was", {}), taken("advised", settings)
    losses, difference = _compared(run, stored.config, [arm.run for arm in arms if arm.failure is None], end)
    left = iter(losses)
    was, advised = (arm if arm.failure is not None else _ended(arm.run, next(left, None), end) for arm in arms)
    return Trial(settings, start or 0, end, why, was, advised, difference)


def _ended(run: Path, loss: float | None, end: int) -> Arm:
    """The arm of a run that reached its `end` with this held-out loss, which is not finite if the run diverged."""
    if loss is None or math.isfinite(loss):
        return Arm(run, loss)
    rows = read_json_lines(RunDirectory(run).metrics_file).rows
    since = next((row["at_step"] for row in rows if row.get("kind") == "non-finite"), end)
    return Arm(run, failure=f"It diverged. Since step {since:,} its loss is not finite.")


def _take(
    stored: StoredRun,
    run: RunDirectory,
    step: int | None,
    settings: Mapping[str, Any],
    target: RunDirectory,
    overwrite: bool,
    console: Console,
) -> None:
    """Trains a branch of a run from the checkpoint of `step`, or the same run from the beginning (None)."""
    if step is not None:
        with RunDirectory.starting(target.path, overwrite=overwrite, reading=[run.path]):
            write_branch(stored, run, step, settings, target)
        place = {"output_dir": str(target.path)}
        train(RunRequest(place, resume=True, must_resume=True, uses_recipe=False, console=console))
        return

    def require_same_data(task: Task, _: StageTimes) -> None:
        if task.fingerprint != stored.record.corpus_fingerprint:
            raise DataError(f"The data of {run.path} have changed since it began, so that nothing can be compared.")

    origin = stored.record.forked_from
    given = changed(stored.config.model_dump(mode="json"), {**settings, "output_dir": str(target.path)})
    fork = None if origin is None else Path(str(origin["path"]))
    again = RunRequest(given, overwrite=overwrite, fork=fork, uses_recipe=False, console=console)
    train(again, prepare=require_same_data)


def _compared(run: Path, config: SheepOpConfig, runs: list[Path], step: int) -> tuple[list[float], Difference | None]:
    """The held-out losses of runs after `step`, and the difference of the second to the first if there are two."""
    device = prepare_process(config)
    request = RunRequest({"output_dir": str(run)}, uses_recipe=False)
    task = followed(request, device, resumes=True).task
    held_out = task.held_out()
    if held_out is None:
        return [], None
    models = (load_model(RunDirectory(each).checkpoint(step), device).model for each in runs)
    found = [_losses_of_rows(model, held_out, task.evaluation_batch, config.training.precision) for model in models]
    if not found:
        return [], None
    counts = found[0][1]
    means = [float(sums.sum() / counts.sum()) for sums, _ in found]
    if len(found) < 2 or not all(map(math.isfinite, means)):
        return means, None
    was, advised = (sums / np.maximum(counts, 1) for sums, _ in found)
    return means, paired_bootstrap(advised, was, counts)


@torch.no_grad()
def _losses_of_rows(
    model: Transformer, rows: Batches, batch_size: int, precision: str
) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """The summed cross-entropy in nats, and the number of labels, of each row."""
    device, losses, counts = str(model.device), list[float](), list[int]()
    for start in range(0, rows.num_samples, batch_size):
        samples = rows.batch(np.arange(start, min(rows.num_samples, start + batch_size)))
        batch = TensorBatch.from_numpy(samples, device)
        with autocast(device, precision):
            inputs: dict[str, Any] = dict(batch.inputs)
            for hidden_TD, labels_T in zip(model.hidden_states(**inputs), batch.labels, strict=True):
                losses.append(float(model.lm_head.score(hidden_TD[None], labels_T[None])[0]))
        counts += (samples.labels != IGNORE_INDEX).sum(-1).tolist()
    return np.array(losses), np.array(counts, dtype=np.float64)
