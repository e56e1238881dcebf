"""What a training step minimises: a function from the model and a batch to summed losses and their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, LossSums, LossTerms
from sheepop.model.experts import Routing
from sheepop.train.config import TrainingConfig
from sheepop.train.placement import Network, Placement
from sheepop.train.tensor_batch import TensorBatch


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

    The last three methods have a body for the usual case; inherit them.
    """

    def supervised(self, batch: Batch) -> int:
        """How many positions of the batch count, or pairs, or whatever the losses are a mean of."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """What is minimised, and the cross-entropy that is reported, summed over the positions that count."""

    def layer_sums(self, network: Network, batch: TensorBatch, routings: Mapping[int, Routing]) -> LossSums:
        """What layers with experts add to these, by their number among them, where `network` does not tell of them."""
        raise ValueError("an objective that asks nothing of experts was given some")

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
