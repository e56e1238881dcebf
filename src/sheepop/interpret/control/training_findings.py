"""What a training run shows at one of its checkpoints: sharpness of the loss, noise of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sheepop.core.facts import counted
from sheepop.interpret.control.advice import NEAR_LIMIT, power_of_two
from sheepop.interpret.control.finding import Finding, columns, data_of, said
from sheepop.interpret.control.layers import LayerHealth
from sheepop.interpret.control.noise import NoiseSample, NoiseScale
from sheepop.interpret.control.stability import MOST_FACTOR, Sharpness, StepResponse
from sheepop.interpret.pictures import Picture, panel, plain
from sheepop.report.palette import TRAIN, VALIDATION

_MOST_LAYERS = 8


@dataclass(frozen=True, eq=False)
class SharpnessFinding(Finding):
    """The sharpness before a step at `rate`, and what the step itself did.

    `highest_rate` is that of the run. `response` is the loss along the step, and `ratios` are those of
    `update_ratios`.
    """

    verb: ClassVar[str] = "sharpness"
    step: int
    rate: float
    highest_rate: float
    sharpness: Sharpness
    response: StepResponse
    ratios: Mapping[str, float]
    health: LayerHealth

    @property
    def share_at_highest(self) -> float:
        """The share of the limit at the highest rate of the run, if the loss were as sharp as here."""
        return self.sharpness.share * self.highest_rate / self.rate

    def table(self) -> list[str]:
        """The eigenvalue and its limit, and the fastest layers."""
        found = self.sharpness
        rows = [
            ("Largest eigenvalue", f"{found.value:.4g}"),
            ("Limit of the optimizer", f"{found.limit:.4g}"),
            ("Share of the limit", f"{shown_share(found.share)} +- {found.residual:.2g}"),
            ("Share at the highest rate", f"{self.share_at_highest:.3f}"),
            ("Products with the Hessian", f"{found.iterations}"),
            ("Rows", f"{found.rows}"),
            ("Loss is lowest after", _steps(self.response.lowest)),
            ("Loss turns after", _steps(self.response.turning)),
            ("Critical sharpness", f"{self.response.critical(self.rate):.4g}"),
        ]
        layers = [(name, f"{ratio:.2e}") for name, ratio in list(self.ratios.items())[:_MOST_LAYERS]]
        return [*columns(("Sharpness", ""), rows), "", *columns(("Fastest matrices", "update / weight"), layers)]

    def sentences(self) -> list[str]:
        """How near the limit the rate is, where the loss is sharpest, and what is wrong with layers."""
        found, share = self.sharpness, self.sharpness.share
        state = "past its limit" if share > 1 else "near its limit" if share > NEAR_LIMIT else "within its limit"
        place, part = next(iter(found.places.items()))
        lines = [
            f"At step {self.step:,} the learning rate {self.rate:.3g} is {state}: {shown_share(share)} of it.",
            f"{part:.0%} of the sharpest direction lie in {place}.",
            self._response_words(),
        ]
        if share > 0:
            lines.insert(1, f"With a loss as sharp as this one, the limit is a rate of {self.rate / share:.3g}.")
        if self.health.attention_logits:
            name, score = max(self.health.attention_logits.items(), key=lambda item: item[1])
            lines.append(f"The largest score of attention is {score:.1f}, in {name}.")
        if self.health.dead_heads:
            lines.append(f"These heads add nothing: {', '.join(self.health.dead_heads)}.")
        for name, units in self.health.dead_units.items():
            lines.append(f"{units:.0%} of the units of {name} are 0 on all tokens.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        found = self.sharpness
        numbers = {
            "step": self.step,
            "learning_rate": self.rate,
            "sharpness": found.value,
            "limit": found.limit,
            "share": found.share,
            "share_at_highest_rate": self.share_at_highest,
            "residual": found.residual,
            "products": found.iterations,
            "rows": found.rows,
            "places": dict(found.places),
            "left_out": list(found.left_out),
            "turning_factor": self.response.turning,
            "critical_sharpness": self.response.critical(self.rate),
            "lowest_factor": self.response.lowest,
            "response": [
                {"factor": factor, "learning_rate": factor * self.rate, "loss": loss}
                for factor, loss in zip(self.response.factors, self.response.losses, strict=True)
            ],
            "update_ratios": dict(self.ratios),
            **data_of(self.health),
        }
        return said(self, numbers)

    def _response_words(self) -> str:
        response = self.response
        if not response.turning:
            return "Along its own update the loss of these rows rises at once, however small the step is."
        before, now, least = (response.loss(factor) for factor in (0.0, 1.0, response.lowest))
        change = f"{'lowers' if now < before else 'raises'} it by {abs(now - before):.2g} nats"
        return (
            f"Along its own update the step {change}. The loss of these rows is lowest, by {before - least:.2g} nats, "
            f"after {_steps(response.lowest)} (a rate of {response.lowest * self.rate:.3g} for this step), and turns "
            f"after {_steps(response.turning)}."
        )

    def pictures(self) -> Iterator[Picture]:
        """The loss over the size of the step."""
        figure, axes = panel(6, 3.8, f"Loss along the update of step {self.step + 1:,}")
        response = self.response
        most = 2 * max(1.0, response.turning)
        near = [pair for pair in zip(response.factors, response.losses, strict=True) if pair[0] <= most]
        axes.plot(*zip(*near, strict=True), color=TRAIN, marker="o", markersize=3)
        axes.axhline(response.losses[0], color=TRAIN, linestyle="--", linewidth=1, label="before the step")
        axes.axvline(1.0, color=VALIDATION, linewidth=1, label="the step itself")
        axes.set(xlabel="Size of the step, in steps of the run", ylabel="Nats per label")
        axes.legend(frameon=False, fontsize=8)
        plain(axes)
        yield Picture("sharpness", figure, {})


def _steps(factor: float) -> str:
    if factor >= MOST_FACTOR:
        return f"more than {MOST_FACTOR:g} steps"
    return f"{factor:.2g} steps" if factor > 0 else "no step at all: the update raises it at once"


@dataclass(frozen=True, eq=False)
class NoiseFinding(Finding):
    """The noise scale of a run whose steps have `batch_rows` rows, from several batches at one checkpoint."""

    verb: ClassVar[str] = "noise"
    step: int
    batch_rows: int
    samples: Sequence[NoiseSample]
    scale: NoiseScale

    def table(self) -> list[str]:
        """The scale, its interval and the batch."""
        rows = [
            ("Noise scale", _rows(self.scale.rows)),
            ("At least", _rows(self.scale.low)),
            ("At most", _rows(self.scale.high)),
            ("Batch of the run", _rows(self.batch_rows)),
            ("Batches measured", f"{len(self.samples)}"),
        ]
        return columns(("Gradient", ""), rows)

    def sentences(self) -> list[str]:
        """Whether the batch is too small or larger than it needs to be."""
        scale, size = self.scale, self.batch_rows
        interval = f"{_rows(scale.low)} to {_rows(scale.high)}"
        if scale.rows == math.inf:
            return [
                f"The signal is lost in the noise of these batches: the noise scale is at least {_rows(scale.low)}."
            ]
        wanted = power_of_two(scale.rows)
        if size < scale.low:
            verdict = f"is smaller: steps are mostly noise, and one of {_rows(wanted)} needs fewer for the same loss"
        elif size > scale.high:
            verdict = f"is larger than it need be: one of {_rows(wanted)} learns about as much in a step, for less work"
        else:
            verdict = "is about as large, which is a good size"
        return [f"The noise scale is {_rows(scale.rows)} ({interval}). The batch of {size:,} {verdict}."]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        numbers = {
            "step": self.step,
            "noise_scale": self.scale.rows,
            "low": self.scale.low,
            "high": self.scale.high,
            "batch_rows": self.batch_rows,
            "recommended_batch": power_of_two(self.scale.rows) if self.scale.rows < math.inf else None,
            "batches": data_of(list(self.samples)),
        }
        return said(self, numbers)


def shown_share(share: float) -> str:
    """A share of a limit with two digits."""
    return f"{share:.2f}" if share >= 0.01 else f"{share:.1g}"


def _rows(rows: float) -> str:
    return "no bound" if rows == math.inf else counted(round(rows), "row")
