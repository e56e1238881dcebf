"""A micro-batch as steps read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX
from sheepop.model.attention.sight import number_documents
from sheepop.model.logits import supervised_places


@dataclass(frozen=True)
class TensorBatch:
    """A micro-batch on the device: what the network reads, as `sheepop.data.Batch.inputs` names it, and labels (B, T).

    `supervised` (M,) are the flat indices of the labels that count, ``slice(None)`` when all do. `given` is what some
    objectives read beside these, as `sheepop.data.Batch.given` names it.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    supervised: Tensor | slice
    given: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_numpy(cls, batch: Batch, device: str) -> TensorBatch:
        """Copies a batch to `device`. Rows without a document boundary take the plain causal path."""
        return cls.on_host(batch).to(device)

    @classmethod
    def on_host(cls, batch: Batch, *, pin: bool = False) -> TensorBatch:
        """The batch in host memory; with `pin` in pages that a GPU reads by itself, beside the work of the loop."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        # Found here and not on the device, which would have to be waited for.
        supervised = np.flatnonzero(batch.labels != IGNORE_INDEX)
        return cls(
            inputs={name: tensor(array) for name, array in batch.inputs().items()},
            labels=tensor(batch.labels),
            supervised=slice(None) if supervised.size == batch.labels.size else tensor(supervised),
            given={name: tensor(array) for name, array in batch.given().items()},
        )

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """The inputs as rows (B, T), where labels are those of P groups of G rows (P, G, T) too."""
        return {name: tensor.flatten(0, -2) for name, tensor in self.inputs.items()}

    def padded(self, multiple: int, *, least: int = 0) -> TensorBatch:
        """Rows filled up behind, without labels, to a multiple of some tokens, and to `least` of them."""
        num_tokens = self.labels.shape[-1]
        missing = max(num_tokens, least) - num_tokens
        missing += -(num_tokens + missing) % multiple
        if not missing:
            return self

        def filled(tensor: Tensor, value: int = 0) -> Tensor:
            found = F.pad(tensor, (0, missing), value=value)
            return found.pin_memory() if tensor.is_pinned() else found

        labels = filled(self.labels, IGNORE_INDEX)
        return TensorBatch(
            {name: filled(tensor) for name, tensor in self.inputs.items()},
            labels,
            supervised_places(labels.flatten()),
            # What has the shape of labels belongs to tokens.
            {
                name: filled(tensor) if tensor.shape == self.labels.shape else tensor
                for name, tensor in self.given.items()
            },
        )

    def columns(self, chosen: slice) -> TensorBatch:
        """The same rows with some of their tokens, whose documents are numbered as in whole rows."""
        if self.given:
            raise ValueError(f"rows with {', '.join(self.given)} beside their tokens are not split over ranks")
        inputs = {**self.inputs}
        if (ids := inputs.get("document_ids")) is not None:
            inputs["document_ids"] = number_documents(ids)
        labels = self.labels[:, chosen].contiguous()
        return TensorBatch(
            {name: tensor[:, chosen].contiguous() for name, tensor in inputs.items()},
            labels,
            supervised_places(labels.flatten()),
        )

    def to(self, device: str) -> TensorBatch:
        """The batch on `device`; from pinned memory the copy does not hold up the host."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        return TensorBatch(
            {name: moved(tensor) for name, tensor in self.inputs.items()},
            moved(self.labels),
            moved(self.supervised) if isinstance(self.supervised, Tensor) else self.supervised,
            {name: moved(tensor) for name, tensor in self.given.items()},
        )
