"""The gradients of one optimizer step, however its global batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.data import Batches
from sheepop.train.objective import Network, Objective, TensorBatch
from sheepop.train.precision import autocast


def accumulate_gradients(
    forward: Network,
    objective: Objective,
    batches: Batches,
    sample_indices: NDArray[np.int64],
    micro_batch_size: int,
    *,
    device: str,
    precision: str,
    loss_scale: float = 1.0,
    before_forward: Callable[[int], None] | None = None,
) -> tuple[float, int]:
    """Adds the gradient of the mean loss of all samples to the parameters; returns that loss and its tokens.

    The loss is divided by the tokens of the whole step, so every token weighs the same however the step is cut.
    Gradients come out multiplied by `loss_scale`, which is no part of the loss returned.
    `before_forward` hears the number of each micro-batch, for the randomness that belongs to it.
    """
    starts = range(0, len(sample_indices), micro_batch_size)
    micro_batches = [batches.batch(sample_indices[start : start + micro_batch_size]) for start in starts]
    num_tokens = sum(objective.supervised(batch) for batch in micro_batches)
    loss = 0.0
    for number, batch in enumerate(micro_batches):
        if before_forward is not None:
            before_forward(number)
        with autocast(device, precision):
            loss_sum = objective.loss_sum(forward, TensorBatch.from_numpy(batch, device))
        # Scaling by a power of two is exact, so that a scale of 1 changes no bit.
        torch.autograd.backward(loss_sum / max(1, num_tokens) * loss_scale)
        loss += loss_sum.item()
    return loss / max(1, num_tokens), num_tokens


def apply_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Moves every parameter by its gradient and clears the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def clear_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Leaves the parameters where they are and clears the gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
