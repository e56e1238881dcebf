"""Supervised fine-tuning beyond its data: noise on the embeddings, so that less is learnt by heart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sheepop.data import Batch
from sheepop.model import LossSums
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network, Placement
from sheepop.train.tensor_batch import TensorBatch


@dataclass(frozen=True)
class NoisyEmbeddings(Objective):
    """`objective` with uniform noise on the embeddings of its forward passes (Jain et al. 2023, NEFTune, section 2).

    Each number of the embeddings (B, T, D) gets noise from ``[-a, a]`` with ``a = alpha / sqrt(T D)``. Scoring and
    sampling, which go past the objective, have none.
    """

    objective: Objective
    alpha: float

    def supervised(self, batch: Batch) -> int:
        """As `objective` counts."""
        return self.objective.supervised(batch)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The losses of `objective` on noisy embeddings."""
        with _noise(network.modules.embedding, self.alpha):
            return self.objective.loss_sums(network, batch)

    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Hands on."""
        self.objective.step_taken(placement, losses)

    def metrics(self, losses: StepLoss) -> dict[str, object]:
        """Those of `objective`."""
        return self.objective.metrics(losses)


@contextmanager
def _noise(embedding: nn.Module, alpha: float) -> Iterator[None]:
    """Adds noise to what `embedding` gives within the block."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...], vectors_BTD: Tensor) -> Tensor:
        bound = alpha / math.sqrt(vectors_BTD.shape[-2] * vectors_BTD.shape[-1])
        return vectors_BTD + torch.empty_like(vectors_BTD).uniform_(-bound, bound)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
