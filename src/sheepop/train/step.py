"""One optimizer step on any placement: gradients, the decision whether to take the step, the update."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sheepop.core.device import keep_freed_memory, return_freed_memory
from sheepop.model import LossSums
from sheepop.model.deferred_gradient import DeferredGradient
from sheepop.model.experts import Routing
from sheepop.train.evaluation_weights import EvaluationWeights
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.optimizers.groups import set_learning_rate
from sheepop.train.optimizers.rows import ELEMENTWISE, group_of, update_rows
from sheepop.train.placement import Loss, Network, Pass, Placement
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.trouble import Limits


@dataclass(frozen=True, eq=False)
class Gradients:
    """The results of a step before its update; the clipped gradients themselves are in the parameters.

    `norm` is the gradient norm before clipping, still on the device. `differences` has a line for each loss or gradient
    that differed between two computations of the step.
    """

    losses: StepLoss
    norm: Tensor
    differences: Sequence[str] = ()

    def read(self) -> tuple[float, float, float]:
        """Objective and cross-entropy in nats per token, and the norm, read in one copy from the device."""
        objective, loss, norm = torch.cat((self.losses.sums.double(), self.norm.double()[None])).tolist()
        return objective / max(1, self.losses.num_tokens), loss / max(1, self.losses.num_tokens), norm

    def exceed(self, limits: Limits) -> Tensor:
        """The negation of `Limits.allow` as a flag on the device: 1.0 if the step must not be taken."""
        objective = self.losses.sums[0].double() / max(1, self.losses.num_tokens)
        norm = self.norm.double()
        allowed = objective.isfinite() & norm.isfinite() & (objective <= limits.loss) & (norm <= limits.norm)
        return (~allowed).float()


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a step: its losses, its gradient norm, and whether the weights were moved."""

    losses: StepLoss
    objective: float
    loss: float  # the cross-entropy; both in nats per token
    norm: float
    is_taken: bool


@dataclass
class StepRunner:
    """Takes steps, for a run, a range test, a measurement or a benchmark.

    With `decides_on_device` (None: on CUDA) the host does not wait between the backward pass and the update if all
    optimizers can read a flag in device memory that tells them to do nothing. The host reads the losses and the norm
    afterwards and comes to the same decision. `is_updating` is true while the weights are being moved.
    """

    placement: Placement
    objective: Objective
    optimizers: Sequence[torch.optim.Optimizer]
    evaluation: EvaluationWeights
    max_grad_norm: float | None
    decides_on_device: bool | None = None
    is_updating: bool = False

    def __post_init__(self) -> None:
        if self.decides_on_device is None:
            self.decides_on_device = self.placement.device == "cuda"

    def take(
        self,
        prepared: PreparedStep,
        *,
        number: int,
        rate: float | None = None,
        loss_scale: float = 1.0,
        before_forward: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Takes step `number` (0 for the first) unless its loss or norm is not finite; see `update`."""
        found = self.gradients(prepared, loss_scale=loss_scale, before_forward=before_forward)
        return self.update(found, Limits(), number=number, rate=rate)

    def gradients(
        self,
        prepared: PreparedStep,
        *,
        loss_scale: float = 1.0,
        before_forward: Callable[[int], None] | None = None,
        verified: bool = False,
    ) -> Gradients:
        """Computes the clipped gradient of the mean objective of the step; the parameters then hold it.

        The objective is divided by the tokens of the whole step, so every token has the same weight however the step is
        cut. The loss is multiplied by `loss_scale` before the backward pass. `before_forward` is called with the number
        of each micro-batch, to seed its random numbers. With `verified`, everything is computed twice and compared.
        """
        placement = self.placement
        self._return_memory()
        placement.zero_gradients()
        if placement.deferred is not None:
            placement.deferred.begin(
                not (verified or self.decides_on_device or self._owner(placement.deferred) is None)
            )
        placement.begin_step()
        with torch.no_grad(), placement.arithmetic():
            batches = (batch.to(placement.device) for batch in prepared.micro_batches)
            objective = self.objective.of_step(placement, batches, placement.reduce)
        pass_of = _Passes(placement, objective, max(1, prepared.num_tokens), loss_scale, before_forward, prepared.first)
        recomputation = Recomputation(placement.model) if verified else None
        if recomputation is not None:
            recomputation.take(placement.compute(prepared.micro_batches, pass_of))
        found = placement.compute(prepared.micro_batches, pass_of)
        if recomputation is not None:
            recomputation.compare(found)
        if loss_scale != 1.0:
            placement.unscale(loss_scale)
        sums = torch.zeros(2, device=placement.device)
        measured: dict[str, Tensor] = {}
        for losses in found:
            sums += torch.stack((losses.objective, losses.cross_entropy))
            measured = {
                name: value + measured[name] if name in measured else value for name, value in losses.measured.items()
            }
        return Gradients(
            StepLoss(
                placement.reduce(sums),
                prepared.num_tokens,
                {name: placement.reduce(measured[name]) for name in sorted(measured)},  # in one order on all ranks
            ),
            placement.clip(self.max_grad_norm).to(placement.device),
            () if recomputation is None else placement.differences(recomputation.differences),
        )

    def update(self, found: Gradients, limits: Limits, *, number: int, rate: float | None = None) -> Outcome:
        """Updates the weights with learning rate `rate` (None: that of the optimizers) and deletes the gradients.

        If the loss or the norm is not finite or above its limit, it only deletes the gradients.
        """
        if self.decides_on_device and all(_is_masked(optimizer) for optimizer in self.optimizers):
            self._move(rate, found.exceed(limits))
            objective, loss, norm = found.read()
            is_taken = limits.allow(objective, norm)
        else:
            objective, loss, norm = found.read()
            is_taken = limits.allow(objective, norm)
            if is_taken:
                self._move(rate)
        if is_taken:
            self.is_updating = True
            self.objective.step_taken(self.placement, found.losses)
            self.evaluation.update(number)
        self.placement.zero_gradients()
        self.is_updating = False
        return Outcome(found.losses, objective, loss, norm, is_taken)

    def _return_memory(self) -> None:
        """Returns freed memory to the system before the first step, whose gradients and optimizer state last.

        From then on the process keeps it. Large pieces that were freed before, such as the copies of a model while it
        is loaded, leave no gaps, over which small ones would spread.
        """
        if self.placement.device == "cpu" and not any(optimizer.state for optimizer in self.optimizers):
            return_freed_memory()
            keep_freed_memory(self.placement.device)

    def _move(self, rate: float | None, left_out: Tensor | None = None) -> None:
        self._return_memory()
        self.is_updating = True
        if rate is not None:
            set_learning_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            if left_out is not None:
                optimizer.found_inf = left_out  # type: ignore[attr-defined]
            optimizer.step()
            if left_out is not None:
                del optimizer.found_inf  # type: ignore[attr-defined]
        deferred = self.placement.deferred
        if deferred is not None and deferred.is_active and (owner := self._owner(deferred)) is not None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()  # the update of the rows finds memory where these gradients were
            update_rows(owner, deferred.weight, deferred.blocks())

    def _owner(self, deferred: DeferredGradient) -> torch.optim.Optimizer | None:
        """The optimizer of the weight, if it can update some rows of it at a time."""
        owners = (each for each in self.optimizers if isinstance(each, ELEMENTWISE) and group_of(each, deferred.weight))
        return next(owners, None)


@dataclass(frozen=True, eq=False)
class _Passes(Pass):
    """The passes of one step; the first micro-batch on this rank has number `first`."""

    placement: Placement
    objective: Objective
    divisor: int
    loss_scale: float
    before_forward: Callable[[int], None] | None
    first: int

    def __call__(self, number: int, batch: TensorBatch, network: Network) -> Loss:
        if self.before_forward is not None:
            self.before_forward(self.first + number)
        with self.placement.arithmetic():
            return self._loss(self.objective.loss_sums(network, batch.to(self.placement.device)))

    def of_layers(self, number: int, batch: TensorBatch, network: Network, routings: Mapping[int, Routing]) -> Loss:
        with self.placement.arithmetic():
            return self._loss(self.objective.layer_sums(network, batch.to(self.placement.device), routings))

    def _loss(self, sums: LossSums) -> Loss:
        # Scaling by a power of two is exact, so a scale of 1 changes no bit.
        return Loss(sums, sums.objective / self.divisor * self.loss_scale)


def _is_masked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a flag can make `optimizer` skip its step; its first step creates its state regardless of the flag."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return (
        isinstance(optimizer, ELEMENTWISE)  # torch's fused kernels of these read the flag `found_inf`
        and all(group["fused"] for group in optimizer.param_groups)
        and all(optimizer.state.get(parameter) for parameter in members if parameter.grad is not None)
    )


class Recomputation:
    """Finds silent corruption: two computations of a step must give losses and gradients with the same bits.

    `differences` has a line for each loss or gradient that differs in any bit: where, and by how much.
    """

    def __init__(self, model: nn.Module) -> None:
        self.differences: list[str] = []
        self._model = model
        self._losses: list[float] = []
        self._gradients: dict[str, Tensor] = {}

    def take(self, found: Sequence[LossSums]) -> None:
        """Takes the losses of the first computation, and its gradients, which it removes from the model."""
        self._losses = [float(losses.objective) for losses in found]
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._gradients[name], parameter.grad = parameter.grad.to_dense(), None

    def compare(self, found: Sequence[LossSums]) -> None:
        """Compares the kept losses and gradients with those of the second computation, and frees them."""
        for before, losses in zip(self._losses, found, strict=True):
            now = float(losses.objective)
            if struct.pack("d", before) != struct.pack("d", now):
                self.differences.append(f"loss: {before!r}, then {now!r}")
        for name, parameter in self._model.named_parameters():
            first = self._gradients.pop(name, None)
            if (first is None) != (parameter.grad is None):
                self.differences.append(f"{name}: only one of the computations gave a gradient")
            elif first is not None and parameter.grad is not None:
                second = parameter.grad.to_dense()
                if not torch.equal(_bits(first), _bits(second)):
                    self.differences.append(f"{name}: {_described(first, second)}")


def _bits(tensor: Tensor) -> Tensor:
    """The bits as integers, because as numbers NaN differs from itself and 0 equals -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _described(one: Tensor, other: Tensor) -> str:
    differ = _bits(one) != _bits(other)
    count = int(differ.sum())
    position = tuple(int(index) for index in differ.nonzero()[0])
    largest = float((one.double() - other.double()).abs().nan_to_num(nan=float("inf")).max())
    return (
        f"{count:,} of {one.numel():,} values differ, by at most {largest:.3g}; the first is at {list(position)}, "
        f"{one[position].item()!r}, then {other[position].item()!r}"
    )
