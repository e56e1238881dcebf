"""The gradients of one optimizer step, however its global batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.data import Batches
from sheepop.train.objective import Network, Objective, TensorBatch
from sheepop.train.precision import autocast
from sheepop.train.verification import Recomputation


def accumulate_gradients(
    forward: Network,
    objective: Objective,
    batches: Batches,
    sample_indices: NDArray[np.int64],
    micro_batch_size: int,
    *,
    device: str,
    precision: str,
    before_forward: Callable[[int], None] | None = None,
    recomputation: Recomputation | None = None,
) -> tuple[float, int]:
    """Adds the gradient of the mean loss of all samples to the parameters; returns that loss and its tokens.

    The loss is divided by the tokens of the whole step, so every token weighs the same however the step is cut.
    `before_forward` hears the number of each micro-batch, for the randomness that belongs to it. With `recomputation`
    the first micro-batch is computed twice and compared.
    """
    starts = range(0, len(sample_indices), micro_batch_size)
    micro_batches = [batches.batch(sample_indices[start : start + micro_batch_size]) for start in starts]
    num_tokens = sum(objective.supervised(batch) for batch in micro_batches)

    def compute(number: int) -> float:
        if before_forward is not None:
            before_forward(number)
        with autocast(device, precision):
            loss_sum = objective.loss_sum(forward, TensorBatch.from_numpy(micro_batches[number], device))
        torch.autograd.backward(loss_sum / max(1, num_tokens))
        return loss_sum.item()

    if recomputation is not None:
        recomputation.take(compute(0))
    loss = 0.0
    for number in range(len(micro_batches)):
        loss += compute(number)
        if recomputation is not None and number == 0:
            recomputation.compare(loss)
    return loss / max(1, num_tokens), num_tokens


def apply_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Moves every parameter by its gradient and clears the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
