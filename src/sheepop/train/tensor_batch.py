"""A micro-batch as tensors."""

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
    """A micro-batch: the inputs of the network, named as by `sheepop.data.Batch.inputs`, and labels (B, T).

    `supervised` (M,) are the flat indices of the labels that count, ``slice(None)`` if all do. `given` are further
    inputs of some objectives, named as by `sheepop.data.Batch.given`.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    supervised: Tensor | slice
    given: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_numpy(cls, batch: Batch, device: str) -> TensorBatch:
        """Copies a batch to `device`. Rows without a document boundary get no document ids (plain causal attention)."""
        return cls.on_host(batch).to(device)

    @classmethod
    def on_host(cls, batch: Batch, *, pin: bool = False) -> TensorBatch:
        """The batch in host memory; with `pin`, in pinned memory, which a GPU reads without holding up the loop."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        # On the host, because the host would have to wait for the device.
        supervised = np.flatnonzero(batch.labels != IGNORE_INDEX)
        return cls(
            inputs={name: tensor(array) for name, array in batch.inputs().items()},
            labels=tensor(batch.labels),
            supervised=slice(None) if supervised.size == batch.labels.size else tensor(supervised),
            given={name: tensor(array) for name, array in batch.given().items()},
        )

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """The inputs as rows (B, T), also if the batch has P groups of G rows (P, G, T)."""
        return {name: tensor.flatten(0, -2) for name, tensor in self.inputs.items()}

    def member(self, number: int) -> TensorBatch:
        """Row `number` of every group (P, G, T), as rows (P, T)."""
        labels = self.labels[:, number].contiguous()
        inputs = {name: tensor[:, number] for name, tensor in self.inputs.items()}
        return TensorBatch(inputs, labels, supervised_places(labels.flatten()))

    def padded(self, multiple: int, *, least: int = 0) -> TensorBatch:
        """The batch with rows padded at the end, without labels, to a multiple of tokens and to at least `least`."""
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
            # A tensor with the shape of the labels has an entry for every token.
            {
                name: filled(tensor) if tensor.shape == self.labels.shape else tensor
                for name, tensor in self.given.items()
            },
        )

    def columns(self, chosen: slice) -> TensorBatch:
        """The same rows with only some of their tokens; documents keep the numbers they have in whole rows."""
        if self.given:
            raise ValueError(f"rows with the further inputs {', '.join(self.given)} cannot be split over ranks")
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
        """The batch on `device`; the host does not wait for a copy from pinned memory."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        return TensorBatch(
            {name: moved(tensor) for name, tensor in self.inputs.items()},
            moved(self.labels),
            moved(self.supervised) if isinstance(self.supervised, Tensor) else self.supervised,
            {name: moved(tensor) for name, tensor in self.given.items()},
        )
