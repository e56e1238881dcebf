"""The learning rate of a run, found by trainings of its network at rates around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.interpret.control.finding import Finding, columns
from sheepop.interpret.pictures import Picture, panel, plain
from sheepop.jobs.analyze import require_no_result, write_finding
from sheepop.jobs.run.analysis import obstacle
from sheepop.jobs.run.build import schedule_of
from sheepop.jobs.run.open import find_resumable, followed
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.jobs.task.fork import Fork
from sheepop.jobs.task.interface import Task
from sheepop.jobs.throw_away import ThrowAway
from sheepop.report.palette import TRAIN, VALIDATION

RATIO = 10**0.5
"""Between two neighbouring rates."""
_MOST = 12  # trainings, from one end of the usual rates to the other


def downhill(loss_at: Callable[[int], float], most: int = _MOST) -> dict[int, float]:
    """Returns the losses at places 0, 1, -1, ...: from the lowest one on until two places on either side are higher.

    Two, because some networks have a second valley behind a rate that is too high for the first. Of equal losses, as
    those of rates that diverge, the one at the lower place counts. Each place is measured once, so that the search from
    its own result ends there again. It also ends after `most` places.
    """
    found = {0: loss_at(0)}
    while len(found) < most:
        lowest = min(sorted(found), key=found.__getitem__)
        place = next((lowest + each for each in (1, -1, 2, -2) if lowest + each not in found), None)
        if place is None:
            break
        found[place] = loss_at(place)
    return dict(sorted(found.items()))


@dataclass(frozen=True, eq=False)
class RateFinding(Finding):
    """Held-out `losses` in nats by the rate of a training of `steps`; infinite where it diverged.

    `rate` and `total` are the rate and the steps of the run.
    """

    verb: ClassVar[str] = "rate"
    rate: float
    steps: int
    total: int
    losses: Mapping[float, float]

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        return min(self.losses, key=self.losses.__getitem__)

    def table(self) -> list[str]:
        """The loss at each rate, and how far it is above the lowest."""
        least = self.losses[self.best]
        rows = [(f"{rate:.3g}", f"{loss:.4f}", f"{loss / least - 1:.1%}") for rate, loss in self.losses.items()]
        return columns(("Rate", "held-out loss", "above the lowest"), rows)

    def sentences(self) -> list[str]:
        """Says what was done, at which cost, and which rate to set."""
        count, best = len(self.losses), self.best
        lines = [
            f"Trained {counted(count, 'time')} for {self.steps:,} of the run's {self.total:,} steps, at the cost of "
            f"{count * self.steps / self.total:.2g} runs."
        ]
        if not math.isfinite(self.losses[best]):
            return [*lines, "No rate was found: the loss is not finite at any of these."]
        if best == self.rate:
            return [*lines, f"Leave training.learning_rate={best:.3g}: the loss is lowest there."]
        if best in (min(self.losses), max(self.losses)):
            lines.append("The loss still falls at the last rate tried, so a run at that one can search on.")
        return [*lines, f"Set training.learning_rate={best:.3g}, where the loss is lowest, instead of {self.rate:.3g}."]

    def numbers(self) -> dict[str, Any]:
        """The rates, their losses, and how long each training was."""
        tried = [{"learning_rate": rate, "loss": loss} for rate, loss in self.losses.items()]
        numbers = {"learning_rate": self.rate, "best": self.best, "steps": self.steps, "total_steps": self.total}
        return {**numbers, "tried": tried}

    def pictures(self) -> Iterator[Picture]:
        """Draws the loss over the rate."""
        figure, axes = panel(6, 3.8, f"Held-out loss after {counted(self.steps, 'step')}")
        finite = [(rate, loss) for rate, loss in self.losses.items() if math.isfinite(loss)]
        axes.plot(*zip(*finite, strict=True), color=TRAIN, marker="o", markersize=4)
        axes.axvline(self.rate, color=VALIDATION, linewidth=1, label="the run")
        axes.set(xlabel="Learning rate", ylabel="Nats per token", xscale="log")
        axes.legend(frameon=False, fontsize=8)
        plain(axes)
        yield Picture("rate", figure, {})


def find_best_rate(
    run: Path,
    *,
    share: float = 1.0,
    output: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    console: Console | None = None,
) -> RateFinding:
    """Trains the network of `run` for a `share` of its steps at its rate and at others, downhill in the held-out loss.

    All begin with the run's initial weights and read the same batches; a schedule that is shorter has the same form.
    Starts and changes no run. Raises `UsageError` for a path without a run, a run with another loss than that of the
    next token, or one that holds nothing out.
    """
    require_no_result(output, RateFinding.verb, overwrite=overwrite)
    stored = find_resumable(run)
    if stored is None:
        raise UsageError(f"{run} is not a training run. Give a run directory, which `sheepop train` writes.")
    # One process trains here, on however many ranks the run was trained.
    config = stored.config.replace(device=device, parallel={})
    if (why := obstacle(config, (RateFinding.verb,))) is not None:
        raise UsageError(f"No rate can be found for {run}. {why}")
    device = prepare_process(config)
    task = followed(RunRequest({"output_dir": str(run)}, uses_recipe=False), device, resumes=True).task
    if task.held_out() is None:
        raise UsageError(f"{run} holds nothing out, so that its losses at several rates cannot be compared.")
    if (origin := stored.record.forked_from) is not None:
        task.origin = Fork(Path(str(origin["path"])))
    rate, total = config.training.learning_rate, config.training.resolved().total_steps
    steps = max(1, round(share * total))

    def rates(place: int) -> float:
        return float(f"{rate * RATIO**place:.3g}") if place else rate

    with (console or Console.silent()).progress("Trying rates", None, "steps") as progress:

        def loss_at(place: int) -> float:
            progress.describe(f"rate {rates(place):g}")
            return short_loss(task, steps, rates(place) / rate, device, progress.advance)

        losses = downhill(loss_at)
    found = RateFinding((), rate, steps, total, {rates(place): loss for place, loss in losses.items()})
    if output is not None:
        write_finding(found, output)
    return found


def short_loss(task: Task, steps: int, factor: float, device: str, on_step: Callable[[], None] = lambda: None) -> float:
    """Returns the held-out loss in nats per token after `steps` at `factor` times the rates of a run.

    The schedule has the same form, in as many steps as there are. The loss is infinite if that of a step is not finite.
    """
    schedule, network = schedule_of(task.config.training), ThrowAway(task, device)
    for step in range(steps):
        loss = network.step(factor * schedule(step * schedule.total_steps / steps))
        if not math.isfinite(loss):
            return math.inf
        on_step()
    found = network.held_out_loss()
    return found if math.isfinite(found) else math.inf
