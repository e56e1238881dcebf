"""The gradients of one optimizer step, however its global batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.data import Batches
from sheepop.train.network import Network
from sheepop.train.objective import Objective, TensorBatch


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The losses of one optimizer step, still on the device; reading them waits until it is done."""

    sums: Tensor  # (2,): the objective and the plain cross-entropy, over all supervised tokens
    num_tokens: int

    def means(self) -> tuple[float, float]:
        """Objective and cross-entropy in nats per token."""
        objective, cross_entropy = self.sums.tolist()
        return objective / max(1, self.num_tokens), cross_entropy / max(1, self.num_tokens)


def accumulate_gradients(
    network: Network,
    objective: Objective,
    batches: Batches,
    sample_indices: NDArray[np.int64],
    micro_batch_size: int,
    *,
    before_forward: Callable[[int], None] | None = None,
) -> StepLoss:
    """Adds the gradient of the mean objective of all samples to the parameters; returns what the samples lost.

    The objective is divided by the tokens of the whole step, so every token weighs the same however the step is cut.
    `before_forward` hears the number of each micro-batch, for the randomness that belongs to it.
    """
    starts = range(0, len(sample_indices), micro_batch_size)
    micro_batches = [batches.batch(sample_indices[start : start + micro_batch_size]) for start in starts]
    num_tokens = sum(objective.supervised(batch) for batch in micro_batches)
    network.begin_step()
    sums = torch.zeros(2, device=network.device)
    for number, batch in enumerate(micro_batches):
        if before_forward is not None:
            before_forward(number)
        with network.arithmetic():
            losses = objective.loss_sums(network, TensorBatch.from_numpy(batch, network.device))
        torch.autograd.backward(losses.objective / max(1, num_tokens))
        sums += torch.stack((losses.objective.detach(), losses.cross_entropy))
    return StepLoss(sums, num_tokens)


def apply_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Moves every parameter by its gradient and clears the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
