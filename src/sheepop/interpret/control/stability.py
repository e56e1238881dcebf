"""How near a training step is to instability: its sharpness against the limit, and where along it the loss turns; and
what a run shows of both, and of its gradient's noise, at a checkpoint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from sheepop.interpret.control.advice import NEAR_LIMIT, power_of_two
from sheepop.interpret.control.curvature import HessianProducts, MeanLoss, Scaling, largest_eigenvalue
from sheepop.interpret.control.finding import Finding, columns, data_of
from sheepop.interpret.control.layers import LayerHealth
from sheepop.interpret.control.noise import NoiseSample, NoiseScale, in_rows
from sheepop.interpret.control.operating_point import stepwise_attention
from sheepop.interpret.pictures import Picture, panel, plain
from sheepop.model import Transformer
from sheepop.report.palette import TRAIN, VALIDATION
from sheepop.train.tensor_batch import TensorBatch

MOST_FACTOR = 64.0
"""The search for the turn of the loss ends at this many steps."""
_BISECTIONS = 4
_PLACES, _MOST_LAYERS = 3, 8
_TRIALS = 12  # of the search for the lowest loss


@dataclass(frozen=True)
class Sharpness:
    """The largest eigenvalue of the preconditioned Hessian, as a `share` of its limit; 1 is the limit.

    `value` and `limit` are those of the first optimizer at its rate; `residual` bounds the error of `share`. `places`
    are the parameters along which the sharpest direction lies most, each with its share of the squared length, and
    `layers` the blocks, or modules outside them. From the share `certain` on, a run with these optimizers is unstable.
    """

    share: float
    residual: float
    limit: float
    iterations: int
    rows: int
    places: Mapping[str, float]
    layers: Mapping[str, float]
    left_out: Sequence[str] = ()
    certain: float = math.inf

    @property
    def value(self) -> float:
        """The eigenvalue itself."""
        return self.share * self.limit


def measure_sharpness(
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: TensorBatch,
    generator: torch.Generator,
    *,
    iterations: int = 14,
    tolerance: float = 0.02,
) -> Sharpness:
    """The sharpness of the mean loss of `batch` for the next step of these optimizers at their present rates.

    `model` is in evaluation mode and float32 or finer; nothing of it changes. The first direction comes from
    `generator`. Raises `UsageError` like `Scaling.of`.
    """
    scaling = Scaling.of(model, optimizers)
    first = scaling.parameters[0]
    count = sum(each.numel() for each in scaling.parameters)
    start = torch.randn(count, generator=generator, dtype=first.dtype).to(first.device)
    with torch.enable_grad(), stepwise_attention(model):
        products = HessianProducts(MeanLoss(model)(batch), scaling.parameters)
        found = largest_eigenvalue(
            lambda vector: scaling(products(scaling(vector))), start, iterations=iterations, tolerance=tolerance
        )
    shares, layers = scaling.shares(found.direction), defaultdict[str, float](float)
    for name, share in shares.items():
        layers[layer_of(name)] += share
    return Sharpness(
        share=found.value,
        residual=found.residual,
        limit=scaling.limit,
        iterations=found.iterations,
        rows=len(batch.labels),
        places=dict(list(shares.items())[:_PLACES]),
        layers=dict(sorted(layers.items(), key=lambda item: -item[1])),
        left_out=tuple(scaling.left_out),
        certain=scaling.certain,
    )


def turning_factor(loss_at: Callable[[float], float], most: float = MOST_FACTOR) -> float:
    """How many steps far the loss stays below its value before the step; 0 if the step does not lower it at all.

    ``loss_at(a)`` is the loss a steps along the update. On a quadratic the loss falls until half this factor, and a
    factor below 1 means that the step raises the loss; the rate could be this many times as high before it does (Kalra
    and Barkeshli 2024, "Why warmup the learning rate"). The answer is at most `most`, within about 5 percent.
    """
    before = loss_at(0.0)

    def is_below(factor: float) -> bool:
        return loss_at(factor) < before

    grows = is_below(1.0)
    factor, step = 1.0, 2.0 if grows else 0.5
    while 1 / most < factor < most and is_below(factor * step) == grows:
        factor *= step
    if not 1 / most < factor < most:
        return most if grows else 0.0
    low, high = sorted((factor, factor * step))
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class StepResponse:
    """The loss in nats per label as a function of the size of a step along its update; the step itself has size 1.

    `losses` are those at the sizes `factors`, which rise from 0. The loss is `lowest` at this size, and back at its
    value before the step at the size `turning`; see `turning_factor`.
    """

    factors: tuple[float, ...]
    losses: tuple[float, ...]
    lowest: float
    turning: float

    @classmethod
    def of(cls, loss_at: Callable[[float], float], most: float = MOST_FACTOR) -> StepResponse:
        """Measures the loss at some sizes between 0 and `most`, and seeks the lowest one below `turning`.

        It is found if the loss falls and then rises (Brent 1973, "Algorithms for minimization without derivatives").
        """
        found: dict[float, float] = {}

        def remembered(factor: float) -> float:
            if factor not in found:
                found[factor] = loss_at(factor)
            return found[factor]

        turning = turning_factor(remembered, most)
        if turning:
            from scipy.optimize import minimize_scalar  # loads slowly

            minimize_scalar(remembered, bounds=(0.0, turning), method="bounded", options={"maxiter": _TRIALS})
        factors, losses = zip(*sorted(found.items()), strict=True)
        return cls(factors, losses, min(found, key=found.__getitem__) if turning else 0.0, turning)

    def critical(self, rate: float) -> float:
        """The critical sharpness of a step at `rate`, ``2 / (rate x turning)`` (Kalra and Barkeshli 2024).

        A quadratic with this curvature along the step turns there. It is infinite if the step lowers nothing.
        """
        return 2 / (rate * self.turning) if self.turning else math.inf

    def loss(self, factor: float) -> float:
        """The loss at one of the sizes that were measured."""
        return self.losses[self.factors.index(factor)]


def loss_along(
    model: Transformer, before: Mapping[str, Tensor], update: Mapping[str, Tensor], batch: TensorBatch
) -> Callable[[float], float]:
    """Returns the mean loss of `batch` as a function of how far the weights `before` are moved along `update`."""
    loss = MeanLoss(model)

    @torch.no_grad()
    def loss_at(factor: float) -> float:
        moved = {f"model.{name}": torch.add(at, update[name], alpha=factor) for name, at in before.items()}
        return float(functional_call(loss, moved, (batch,)))

    return loss_at


def layer_of(name: str) -> str:
    """The block of a parameter, or its module outside the blocks."""
    parts = name.split(".")
    place = parts.index("blocks") if "blocks" in parts else -1
    return ".".join(parts[: place + 2]) if place >= 0 else ".".join(parts[:-1])


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
        if share > 1 and found.certain < math.inf:
            lines.insert(2, f"With this optimizer a run is unstable for certain from {found.certain:g} of it on.")
        if self.health.attention_logits:
            name, score = max(self.health.attention_logits.items(), key=lambda item: item[1])
            lines.append(f"The largest score of attention is {score:.1f}, in {name}.")
        if self.health.dead_heads:
            lines.append(f"These heads add nothing: {', '.join(self.health.dead_heads)}.")
        for name, units in self.health.dead_units.items():
            lines.append(f"{units:.0%} of the units of {name} are 0 on all tokens.")
        return lines

    def numbers(self) -> dict[str, Any]:
        """The sharpness, the response of the loss, and what is known of the layers."""
        found, response = self.sharpness, self.response
        points = zip(response.factors, response.losses, strict=True)
        return {
            "step": self.step,
            "learning_rate": self.rate,
            "update_ratios": dict(self.ratios),
            "sharpness": found.value,
            "limit": found.limit,
            "share": found.share,
            "residual": found.residual,
            "share_at_highest_rate": self.share_at_highest,
            "products": found.iterations,
            "rows": found.rows,
            "places": dict(found.places),
            "left_out": list(found.left_out),
            "critical_sharpness": response.critical(self.rate),
            "turning_factor": response.turning,
            "lowest_factor": response.lowest,
            "response": [{"factor": at, "learning_rate": at * self.rate, "loss": loss} for at, loss in points],
            **data_of(self.health),
        }

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
        """Draws the loss over the size of the step."""
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
        scale = self.scale
        sizes = {"Noise scale": scale.rows, "At least": scale.low, "At most": scale.high}
        rows = [(name, in_rows(size)) for name, size in {**sizes, "Batch of the run": self.batch_rows}.items()]
        return columns(("Gradient", ""), [*rows, ("Batches measured", f"{len(self.samples)}")])

    def sentences(self) -> list[str]:
        """Whether the batch is too small or larger than it needs to be."""
        scale, size = self.scale, self.batch_rows
        if scale.rows == math.inf:
            return [
                f"The signal is lost in the noise of these batches: the noise scale is at least {in_rows(scale.low)}."
            ]
        wanted = power_of_two(scale.rows)
        verdict = "is about as large, which is a good size"
        if size < scale.low:
            need = "needs fewer steps for the same loss, but more rows, since each teaches less"
            verdict = f"is smaller: one of {in_rows(wanted)} {need}"
        elif size > scale.high:
            need = "learns about as much in a step, for less work"
            verdict = f"is larger than it need be: one of {in_rows(wanted)} {need}"
        return [f"The noise scale is {scale.words}. The batch of {size:,} {verdict}."]

    def numbers(self) -> dict[str, Any]:
        """The scale and its interval, the batches, and the size that the scale recommends."""
        scale = self.scale
        wanted = power_of_two(scale.rows) if scale.rows < math.inf else None
        numbers = {"step": self.step, "noise_scale": scale.rows, "low": scale.low, "high": scale.high}
        return {**numbers, "batch_rows": self.batch_rows, "recommended_batch": wanted, "batches": data_of(self.samples)}


def shown_share(share: float) -> str:
    """A share of a limit with two digits."""
    return f"{share:.2f}" if share >= 0.01 else f"{share:.1g}"
