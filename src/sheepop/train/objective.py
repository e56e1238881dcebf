"""What a training step minimises: a function from the model and a batch to summed losses and their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, cross_entropy_sum

# A model, or its compiled form: token ids, positions and document ids in, logits out.
Network = Callable[..., Tensor]


@dataclass(frozen=True)
class TensorBatch:
    """A micro-batch on the device; shapes as in `sheepop.data.Batch`. `document_ids` is None for whole rows."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None
    document_ids: Tensor | None

    @classmethod
    def from_numpy(cls, batch: Batch, device: str) -> TensorBatch:
        """Copies a batch to `device`. Rows without a document boundary take the plain causal path."""
        return cls.on_host(batch).to(device)

    @classmethod
    def on_host(cls, batch: Batch, *, pin: bool = False) -> TensorBatch:
        """The batch in host memory; with `pin` in pages that a GPU reads by itself, beside the work of the loop."""

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        packed = batch.has_boundaries
        return cls(
            input_ids=tensor(batch.input_ids),
            labels=tensor(batch.labels),
            positions=tensor(batch.positions) if packed else None,
            document_ids=tensor(batch.document_ids) if packed else None,
        )

    def to(self, device: str) -> TensorBatch:
        """The batch on `device`; from pinned memory the copy does not hold up the host."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        return TensorBatch(
            moved(self.input_ids),
            moved(self.labels),
            None if self.positions is None else moved(self.positions),
            None if self.document_ids is None else moved(self.document_ids),
        )


class Objective(Protocol):
    """The loss of a micro-batch, summed, so that a step of several micro-batches divides once by all its tokens."""

    def supervised(self, batch: Batch) -> int:
        """How many positions of the batch count."""

    def loss_sum(self, model: Network, batch: TensorBatch) -> Tensor:
        """The summed loss (scalar, float32) of the positions that count."""


class NextToken:
    """Cross-entropy of the next token, the objective of pre-training."""

    def supervised(self, batch: Batch) -> int:
        """Positions whose label is not -100."""
        return int(np.count_nonzero(batch.labels != IGNORE_INDEX))

    def loss_sum(self, model: Network, batch: TensorBatch) -> Tensor:
        """``-sum log p(label)`` over those positions."""
        return cross_entropy_sum(logits_of(model, batch), batch.labels)


def logits_of(model: Network, batch: TensorBatch) -> Tensor:
    """Logits (B, T, V) of a batch under its own positions and documents."""
    return model(batch.input_ids, positions=batch.positions, document_ids=batch.document_ids)
