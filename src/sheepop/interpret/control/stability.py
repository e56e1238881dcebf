"""How near a training step is to instability: its sharpness against the limit, and where along it the loss turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from sheepop.interpret.control.curvature import (
    HessianProducts,
    MeanLoss,
    Scaling,
    largest_eigenvalue,
    stepwise_attention,
)
from sheepop.model import Transformer
from sheepop.train.tensor_batch import TensorBatch

MOST_FACTOR = 64.0
"""The search for the turn of the loss ends at this many steps."""
_BISECTIONS = 4
_PLACES = 3
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
    shares = scaling.shares(found.direction)
    return Sharpness(
        found.value,
        found.residual,
        scaling.limit,
        found.iterations,
        len(batch.labels),
        dict(list(shares.items())[:_PLACES]),
        _by_layer(shares),
        tuple(scaling.left_out),
        scaling.certain,
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
    """The mean loss of `batch` as a function of how far the weights `before` are moved along `update`."""
    loss = MeanLoss(model)

    @torch.no_grad()
    def loss_at(factor: float) -> float:
        moved = {f"model.{name}": torch.add(at, update[name], alpha=factor) for name, at in before.items()}
        return float(functional_call(loss, moved, (batch,)))

    return loss_at


def _by_layer(shares: Mapping[str, float]) -> dict[str, float]:
    """The shares of parameters summed over their layers, largest first."""
    found: dict[str, float] = {}
    for name, share in shares.items():
        layer = layer_of(name)
        found[layer] = found.get(layer, 0.0) + share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def layer_of(name: str) -> str:
    """The block of a parameter, or its module outside the blocks."""
    parts = name.split(".")
    place = parts.index("blocks") if "blocks" in parts else -1
    return ".".join(parts[: place + 2]) if place >= 0 else ".".join(parts[:-1])
