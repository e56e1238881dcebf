"""What a training step minimises: a function from the model and a batch to summed losses and their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, LossSums, LossTerms
from sheepop.model.attention.sight import number_documents
from sheepop.train.config import TrainingConfig
from sheepop.train.placement import Network, Placement


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

    def columns(self, chosen: slice) -> TensorBatch:
        """The same rows with some of their tokens, whose documents are numbered as in whole rows."""
        if self.given:
            raise ValueError(f"rows with {', '.join(self.given)} beside their tokens are not split over ranks")
        inputs = {**self.inputs}
        if (ids := inputs.get("document_ids")) is not None:
            inputs["document_ids"] = number_documents(ids)
        labels = self.labels[:, chosen].contiguous()
        supervised = torch.nonzero(labels.flatten() != IGNORE_INDEX)[:, 0]
        return TensorBatch(
            {name: tensor[:, chosen].contiguous() for name, tensor in inputs.items()},
            labels,
            slice(None) if len(supervised) == labels.numel() else supervised,
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


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The losses of one optimizer step, still on the device; reading them waits until it is done."""

    sums: Tensor  # (2,): the objective and the plain cross-entropy, over all supervised tokens
    num_tokens: int
    measured: Mapping[str, Tensor] = field(default_factory=dict)  # as in `LossSums`, added up over the micro-batches

    def means(self) -> tuple[float, float]:
        """Objective and cross-entropy in nats per token."""
        objective, cross_entropy = self.sums.tolist()
        return objective / max(1, self.num_tokens), cross_entropy / max(1, self.num_tokens)


class Objective(Protocol):
    """The loss of a micro-batch, summed, so that a step of several micro-batches divides once by all its tokens.

    The last two methods have a body for the usual case; inherit them.
    """

    def supervised(self, batch: Batch) -> int:
        """How many positions of the batch count, or pairs, or whatever the losses are a mean of."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """What is minimised, and the cross-entropy that is reported, summed over the positions that count."""

    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Hears that the optimizer has taken the step of these losses."""
        return

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """What is logged of a step beside its cross-entropy."""
        return {}


@dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the next token, the objective of pre-training, with what `terms` add to it."""

    terms: LossTerms = field(default_factory=LossTerms)

    @classmethod
    def configured(cls, config: TrainingConfig) -> NextToken:
        """The objective with the terms that a run's configuration asks for."""
        return cls(LossTerms(z_loss=config.z_loss, label_smoothing=config.label_smoothing))

    def supervised(self, batch: Batch) -> int:
        """Positions whose label is not -100."""
        return int(np.count_nonzero(batch.labels != IGNORE_INDEX))

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """``-sum log p(label)`` over those positions, without and with the added terms."""
        hidden_BTD = network.hidden_states(batch.inputs)
        return network.head.cross_entropy(hidden_BTD, batch.labels, self.terms, batch.supervised)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """What was minimised, where that is not the cross-entropy."""
        return {} if self.terms == LossTerms() else {"objective": losses.means()[0]}


OBJECTIVES: dict[str, Callable[[TrainingConfig], Objective]] = {"next_token": NextToken.configured}
"""What `training.objective` may name, made from the settings of the training."""
