"""The gradients of one optimizer step, however its global batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.data import Batch, batch_hash
from sheepop.train.network import Network
from sheepop.train.objective import Objective, StepLoss, TensorBatch
from sheepop.train.verification import Recomputation


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """The global batch of a step, cut into micro-batches in host memory, and how many positions of it count."""

    micro_batches: Sequence[TensorBatch]
    num_tokens: int
    batch_hash: str | None = None

    @property
    def row_length(self) -> int:
        """The tokens of a row, the same in all of them, or of pairs those of the first micro-batch."""
        return self.micro_batches[0].labels.shape[1]

    @classmethod
    def of(
        cls, batch: Batch, micro_batch_size: int, objective: Objective, *, device: str, hashed: bool = False
    ) -> PreparedStep:
        """Cuts `batch` into micro-batches of at most `micro_batch_size` rows; the last one may be smaller."""
        starts = range(0, len(batch.input_ids), micro_batch_size)
        pieces = [batch.rows(slice(start, start + micro_batch_size)) for start in starts]
        return cls(
            [TensorBatch.on_host(piece, pin=device == "cuda") for piece in pieces],
            sum(objective.supervised(piece) for piece in pieces),
            batch_hash(batch) if hashed else None,
        )


def accumulate_gradients(
    network: Network,
    objective: Objective,
    prepared: PreparedStep,
    *,
    loss_scale: float = 1.0,
    before_forward: Callable[[int], None] | None = None,
    recomputation: Recomputation | None = None,
) -> StepLoss:
    """Adds the gradient of the mean objective of all samples to the parameters; returns what the samples lost.

    The objective is divided by the tokens of the whole step, so every token weighs the same however the step is cut.
    Gradients come out multiplied by `loss_scale`, which is no part of the losses returned.
    `before_forward` hears the number of each micro-batch, for the randomness that belongs to it. With `recomputation`
    the first micro-batch is computed twice and compared.
    """
    num_tokens = prepared.num_tokens
    network.begin_step()

    def compute(number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        if before_forward is not None:
            before_forward(number)
        with network.arithmetic():
            losses = objective.loss_sums(network, prepared.micro_batches[number].to(network.device))
        # Scaling by a power of two is exact, so that a scale of 1 changes no bit.
        torch.autograd.backward(losses.objective / max(1, num_tokens) * loss_scale)
        return torch.stack((losses.objective.detach(), losses.cross_entropy)), losses.measured

    if recomputation is not None:
        recomputation.take(float(compute(0)[0][0]))
    sums = torch.zeros(2, device=network.device)
    measured: dict[str, Tensor] = {}
    for number in range(len(prepared.micro_batches)):
        found, others = compute(number)
        sums += found
        measured = {name: value + measured[name] if name in measured else value for name, value in others.items()}
        if recomputation is not None and number == 0:
            recomputation.compare(float(found[0]))
    return StepLoss(sums, num_tokens, measured)


def apply_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Moves every parameter by its gradient and clears the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def clear_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Leaves the parameters where they are and clears the gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
