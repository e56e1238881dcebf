"""Objectives: functions from the model and a batch to the summed losses that a step minimises."""

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
    """The losses of one optimizer step, still on the device; reading them waits for the step."""

    sums: Tensor  # (2,): the sums of the objective and of the cross-entropy over all supervised tokens
    num_tokens: int
    measured: Mapping[str, Tensor] = field(default_factory=dict)  # as in `LossSums`, summed over the micro-batches

    def means(self) -> tuple[float, float]:
        """Objective and cross-entropy in nats per token."""
        objective, cross_entropy = self.sums.tolist()
        return objective / max(1, self.num_tokens), cross_entropy / max(1, self.num_tokens)


class Objective(Protocol):
    """The summed loss of a micro-batch; a step of several micro-batches divides it once by all its tokens.

    Inherit the last three methods: their bodies are right for most objectives.
    """

    def supervised(self, batch: Batch) -> int:
        """The number of units (positions, or pairs) in the batch that the mean loss is taken over."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sums, over the supervised positions, of the objective and of the cross-entropy to report."""

    def layer_sums(self, network: Network, batch: TensorBatch, routings: Mapping[int, Routing]) -> LossSums:
        """The losses of layers with experts, by their number among these layers, if `network` does not return them."""
        raise ValueError("this objective has no losses for layers with experts")

    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Called after the optimizer has taken the step of these losses."""
        return

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The metrics to log in addition to the cross-entropy."""
        return {}


@dataclass(frozen=True)
class NextToken(Objective):
    """The objective of pre-training: cross-entropy of the next token, plus the losses in `terms`."""

    terms: LossTerms = field(default_factory=LossTerms)

    @classmethod
    def configured(cls, config: TrainingConfig) -> NextToken:
        """The objective with the terms of a run's configuration."""
        return cls(LossTerms(z_loss=config.z_loss, label_smoothing=config.label_smoothing))

    def supervised(self, batch: Batch) -> int:
        """The number of positions whose label is not -100."""
        return int(np.count_nonzero(batch.labels != IGNORE_INDEX))

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """``-sum log p(label)`` over those positions, with and without the added terms."""
        hidden_BTD = network.hidden_states(batch.inputs)
        return network.head.cross_entropy(hidden_BTD, batch.labels, self.terms, batch.supervised)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The objective, if it is not the cross-entropy."""
        return {} if self.terms == LossTerms() else {"objective": losses.means()[0]}


OBJECTIVES: dict[str, Callable[[TrainingConfig], Objective]] = {"next_token": NextToken.configured}
"""The objectives that `training.objective` can name, as functions of the training settings."""
