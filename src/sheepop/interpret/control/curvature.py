"""The curvature of the loss in the directions in which an optimizer steps, and the largest that it can bear.

A step of gradient descent with the rate r on a quadratic with the eigenvalue a multiplies the distance from the minimum
by ``1 - r a``, which grows once ``r a`` exceeds 2. An optimizer that scales its steps by D and averages gradients has
another limit c for ``r D H``: here D contains ``r / c``, so that every optimizer is at its limit when the largest
eigenvalue of ``D^(1/2) H D^(1/2)`` is 1 (Cohen et al. 2022, "Adaptive gradient methods at the edge of stability").

P is the number of trained parameters. All vectors are flat, (P,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sheepop.core.errors import UsageError
from sheepop.interpret.control.jacobian import Basis, bidiagonal
from sheepop.model import IGNORE_INDEX, Transformer
from sheepop.train.optimizers.adafactor import RowAdagrad
from sheepop.train.optimizers.momentum import Muon, orthogonalize
from sheepop.train.tensor_batch import TensorBatch

_ALL_BUT_0 = 1e-6
MUON_CERTAIN = 100.0
"""The share of Muon's limit from which a run is too fast.

No growth follows from a share above 1, since all steps have one length. But the higher the rate, the longer get weights
and swings, and the larger is the share: its geometric mean over three measurements in a row is at most 71 at the best
rates of seven networks. All runs with one above 100 ended 7 percent or more above the best loss (docs/control.md).
"""

Root = Callable[[Tensor], Tensor]
"""Multiplies the entries of one parameter by ``D^(1/2)``."""


def adamw_limit(beta: float, rate: float, decay: float) -> float:
    """The largest stable eigenvalue of the preconditioned Hessian: ``(1 + b)(2 - r w) / (r (1 - b))``; 38 / r at b 0.9.

    It follows from the characteristic polynomial of ``x' = (1 - r w) x - r m'`` and ``m' = b m + (1 - b) a x``. From
    ``r w = 2`` on the decay alone is unstable, and the limit is all but 0.
    """
    return (1 + beta) * max(_ALL_BUT_0, 2 - rate * decay) / (rate * (1 - beta))


def sgd_limit(momentum: float, rate: float) -> float:
    """The limit of SGD with heavy-ball momentum, ``2 (1 + m) / r`` (Polyak 1964)."""
    return 2 * (1 + momentum) / rate


def muon_limit(momentum: float, rate: float, decay: float) -> float:
    """The limit of averaged Nesterov momentum, ``(1 + m)(2 - r w) / (r (1 - m)(1 + 2 m))``.

    It follows like that of AdamW, for steps along ``(1 - m) g + m m'``.
    """
    return adamw_limit(momentum, rate, decay) / (1 + 2 * momentum)


def summed_loss(model: Transformer, batch: TensorBatch) -> Tensor:
    """The summed cross-entropy of the labels, in nats, by plain operations that have second derivatives."""
    logits = model.read_out(model.hidden_states(**batch.inputs)).flatten(0, -2)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return nn.functional.cross_entropy(
        logits.to(exact), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def num_labels(batch: TensorBatch) -> int:
    """The number of labels that count, at least 1."""
    return max(1, int((batch.labels != IGNORE_INDEX).sum()))


def rows_of(batch: TensorBatch, chosen: slice | list[int]) -> TensorBatch:
    """Returns some rows of a batch."""
    return TensorBatch({name: rows[chosen] for name, rows in batch.inputs.items()}, batch.labels[chosen], slice(None))


class MeanLoss(nn.Module):
    """The mean loss of a batch as a module, so that `torch.func.functional_call` can compute it with other weights."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TensorBatch) -> Tensor:
        """The mean cross-entropy in nats per label."""
        return summed_loss(self.model, batch) / num_labels(batch)


@dataclass(frozen=True, eq=False)
class Scaling:
    """``D^(1/2)`` of the parameters that an analysis moves: those of optimizers with a known limit.

    `names` and `parameters` are in the same order as `roots`. `limit` is the largest stable eigenvalue of the first
    optimizer's own preconditioned Hessian, at its rate; `left_out` names parameters that the analysis keeps fixed. From
    the share `certain` of the limit on, a run is unstable; below it may stay at the edge of stability without harm.
    """

    names: Sequence[str]
    parameters: Sequence[Tensor]
    roots: Sequence[Root]
    limit: float
    left_out: Sequence[str] = ()
    certain: float = math.inf

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Scaling:
        """The scaling of these optimizers in their present state, at their present rates.

        Raises `UsageError` for an optimizer without a known limit, for one that has taken no step yet, or at rate 0.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        found: list[tuple[str, Tensor, Root, float, float]] = []
        left_out: list[str] = []
        every = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups if group["lr"] > 0]
        for optimizer, group in every:
            for each in filter(lambda parameter: parameter.requires_grad, group["params"]):
                state = optimizer.state.get(each) or {}
                if isinstance(optimizer, RowAdagrad):
                    left_out.append(names[each])
                    continue
                limit, certain = _limit(optimizer, group, state)
                if state or isinstance(optimizer, torch.optim.SGD):
                    # The limit is in units of the run's rate, which the group multiplies by its factor.
                    root, limit = _root(optimizer, group, state, limit), limit * group.get("learning_rate_factor", 1.0)
                    found.append((names[each], each, root, limit, certain))
        if not found:
            raise UsageError(
                "The optimizer has no state yet, or its learning rate is 0, so there is no step to measure. Take a "
                "checkpoint from after the first steps and before the rate ends at 0, with its folder state/."
            )
        own, parameters, roots, limits, shares = zip(*found, strict=True)
        return cls(own, parameters, roots, limits[0], left_out, max(shares))

    def __call__(self, vector: Tensor) -> Tensor:
        """``D^(1/2)`` times a vector (P,)."""
        return _joined(root(part) for root, part in zip(self.roots, _split(vector, self.parameters), strict=True))

    def shares(self, vector: Tensor) -> dict[str, float]:
        """The share of each parameter in the squared length of a vector (P,), largest first."""
        squares = torch.stack([part.square().sum() for part in _split(vector, self.parameters)])
        shares = dict(zip(self.names, (squares / squares.sum()).tolist(), strict=True))
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _split(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector (P,) in the shapes of the parameters."""
    parts = torch.split(vector, [each.numel() for each in parameters])
    return [part.view_as(at) for part, at in zip(parts, parameters, strict=True)]


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in parts])


def _limit(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[float, float]:
    """The limit, and the share of it from which a run is unstable for certain.

    A scaling that follows the gradient ends the growth beyond the limit: that of Muon at once, because its steps have
    one length, and that of Adam within 1 / (1 - b2) steps, because larger gradients make it smaller (Cohen et al.
    2022). In its first steps Adam's average is short, and follows sooner. For Muon the share is therefore no theorem
    but a measurement; see `MUON_CERTAIN`.
    """
    rate, decay = group["lr"], group["weight_decay"]
    if isinstance(optimizer, torch.optim.Adam):
        decay = decay if isinstance(optimizer, torch.optim.AdamW) else 0.0
        is_long = float(state.get("step", 0.0)) * (1 - group["betas"][1]) >= 1
        return adamw_limit(group["betas"][0], rate, decay), 2.0 if is_long else math.inf
    if isinstance(optimizer, Muon):
        return muon_limit(group["momentum"], rate, decay), MUON_CERTAIN
    if isinstance(optimizer, torch.optim.SGD):
        return sgd_limit(group["momentum"], rate), 1.2
    raise UsageError(
        f"The limit of {type(optimizer).__name__} is not known: a step of it is not a scaled gradient. Sharpness is "
        "measured for adamw, adam, muon and sgd; leave it out of analysis.quantities."
    )


def _root(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], limit: float) -> Root:
    """Returns ``(P / limit)^(1/2)``; the optimizer steps by the rate times P times the averaged gradient."""
    if isinstance(optimizer, Muon):
        side, is_left = _muon_root(state["momentum"])
        side = side / math.sqrt(limit)
        return lambda matrix: side.to(matrix.dtype) @ matrix if is_left else matrix @ side.to(matrix.dtype)
    if isinstance(optimizer, torch.optim.SGD):
        return lambda vector: vector / math.sqrt(limit)
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    # Torch divides the average and its square by these, so that they start without bias.
    deviation = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    # What has never had a gradient, such as a dead head, does not move.
    root = (limit * (1 - beta1**step) * deviation).rsqrt().where(state["exp_avg_sq"] > 0, 0.0)
    return lambda vector: root.to(vector.dtype) * vector


def _muon_root(momentum: Tensor) -> tuple[Tensor, bool]:
    """``(0.2 sqrt(max(R, C)) f(s) / s)^(1/2)`` on the singular vectors of the momentum's shorter side, and which it is.

    Muon replaces each singular value s of the momentum (..., R, C) by f(s), near 1. With the momentum fixed that
    multiplies a gradient by a symmetric matrix, from the left (True) or from the right, as Shampoo does.
    """
    rows, columns = momentum.shape[-2:]
    left, values, right = torch.linalg.svd(momentum, full_matrices=False)
    flat = values.reshape(-1, values.shape[-1])
    # The iteration acts on singular values alone, so those of a diagonal matrix show what it does to them.
    replaced = torch.stack([orthogonalize(torch.diag(each)[None])[0].diagonal() for each in flat]).view_as(values)
    gains = replaced.abs() / values.clamp(min=torch.finfo(values.dtype).tiny)
    side = left if rows <= columns else right.mT
    return (side * (0.2 * math.sqrt(max(rows, columns)) * gains).sqrt()[..., None, :]) @ side.mT, rows <= columns


class HessianProducts:
    """Products of the Hessian of a scalar `loss` with vectors, by differentiating the gradient once more.

    It keeps the graph of the gradient, so that each product costs two backward passes through it (Pearlmutter 1994).
    """

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)

    def __call__(self, vector: Tensor) -> Tensor:
        """The Hessian times a vector (P,)."""
        directions = _split(vector, self._parameters)
        linked = [pair for pair in zip(self._gradients, directions, strict=True) if pair[0].requires_grad]
        if not linked:
            return torch.zeros_like(vector)
        gradients, along = zip(*linked, strict=True)
        products = torch.autograd.grad(gradients, self._parameters, along, retain_graph=True, materialize_grads=True)
        return _joined(products)


@dataclass(frozen=True, eq=False)
class Extreme:
    """The largest eigenvalue of a symmetric operator, with a bound of its error and its direction (P,).

    Some eigenvalue lies within `residual` of `value`, and the largest one is at least `value`.
    """

    value: float
    residual: float
    iterations: int
    direction: Tensor


def largest_eigenvalue(
    apply: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, tolerance: float = 0.02
) -> Extreme:
    """Returns the largest eigenvalue of `apply`, found from `start` (P,) by Lanczos with full orthogonalisation.

    It ends when the residual is below `tolerance` times the value, or after `iterations` products (Golub and Van Loan,
    section 10.1). It keeps one vector for each product. Where a product is not finite, the value is NaN.
    """
    most = min(iterations, len(start))
    basis = Basis(start, most + 1)
    basis.add(start, 0.0)
    diagonal, beside = list[float](), list[float]()
    while True:
        direction = basis.last
        product = apply(direction)
        diagonal.append(float(product @ direction))
        rest = basis.add(product, max(map(abs, diagonal)))
        if not math.isfinite(diagonal[-1] + rest):
            return Extreme(math.nan, math.nan, len(diagonal), direction)
        values, vectors = torch.linalg.eigh(bidiagonal(diagonal, beside), UPLO="U")
        value, residual = float(values[-1]), rest * abs(float(vectors[-1, -1]))
        if len(diagonal) == most or not residual > tolerance * abs(value):
            return Extreme(value, residual, len(diagonal), basis.combined(vectors[:, -1]))
        beside.append(rest)
