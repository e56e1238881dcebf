"""Objectives for supervised fine-tuning: noise on the embeddings (NEFTune), and distillation from a teacher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sheepop.data import Batch
from sheepop.model import LossSums, Transformer
from sheepop.model.head import OutputHead
from sheepop.model.logits import chunk_rows
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network, Placement
from sheepop.train.tensor_batch import TensorBatch


@dataclass(frozen=True)
class NoisyEmbeddings(Objective):
    """`objective` with uniform noise on the embeddings of its forward passes (Jain et al. 2023, NEFTune, section 2).

    Each number of the embeddings (B, T, D) gets noise from ``[-a, a]`` with ``a = alpha / sqrt(T D)``. Scoring and
    sampling do not use the objective, so they have no noise.
    """

    objective: Objective
    alpha: float

    def supervised(self, batch: Batch) -> int:
        """The count of `objective`."""
        return self.objective.supervised(batch)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The losses of `objective` on noisy embeddings."""
        with _noise(network.modules.embedding, self.alpha):
            return self.objective.loss_sums(network, batch)

    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Calls `step_taken` of `objective`."""
        self.objective.step_taken(placement, losses)

    def metrics(self, losses: StepLoss) -> dict[str, object]:
        """The metrics of `objective`."""
        return self.objective.metrics(losses)


@contextmanager
def _noise(embedding: nn.Module, alpha: float) -> Iterator[None]:
    """Adds noise to the outputs of `embedding` within the block."""

    def add(module: nn.Module, inputs: tuple[Tensor, ...], vectors_BTD: Tensor) -> Tensor:
        bound = alpha / math.sqrt(vectors_BTD.shape[-2] * vectors_BTD.shape[-1])
        return vectors_BTD + torch.empty_like(vectors_BTD).uniform_(-bound, bound)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def generalised_divergence(taught: Tensor, found: Tensor, beta: float) -> Tensor:
    """The sum over tokens of the divergence of a model from its teacher (Agarwal et al. 2023, GKD, section 2).

    For log-probabilities (N, V) of the teacher P and the model Q it is ``b KL(P, M) + (1 - b) KL(Q, M)`` with
    ``M = b P + (1 - b) Q``; KL(P, Q) if `beta` b is 0, and KL(Q, P) if it is 1.
    """
    if beta in (0.0, 1.0):
        of, reference = (taught, found) if beta == 0.0 else (found, taught)
        return F.kl_div(reference, of, reduction="sum", log_target=True)
    mixed = torch.logaddexp(taught + math.log(beta), found + math.log1p(-beta))
    to_mixed = (F.kl_div(mixed, each, reduction="sum", log_target=True) for each in (taught, found))
    return beta * next(to_mixed) + (1 - beta) * next(to_mixed)


@dataclass(frozen=True, eq=False)
class Distillation(Objective):
    """``(1 - w) CE + w T^2 D(teacher, model)`` at every learnt token (Hinton et al. 2015, section 2).

    w is the `weight` of the teacher, D the `generalised_divergence` with `beta`, whose distributions have the
    temperature T. The teacher has the same tokenizer and gets no gradient; logits that only one of the models has are
    of no token and do not count in D.
    """

    teacher: Transformer
    weight: float
    temperature: float
    beta: float = 0.0

    def supervised(self, batch: Batch) -> int:
        """The number of learnt tokens."""
        return batch.num_labels

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all learnt tokens, computed in parts and recomputed in the backward pass."""
        hidden_MD = network.hidden_states(batch.inputs).flatten(0, 1)[batch.supervised]
        labels_M = batch.labels.flatten()[batch.supervised]
        with torch.no_grad():
            taught_ME = self.teacher.hidden_states(**batch.inputs).flatten(0, 1)[batch.supervised]
        size = chunk_rows(len(labels_M), network.head.weight.shape[0], torch.float32, hidden_MD.device.type) or 1
        total, cross_entropy, divergence = (hidden_MD.new_zeros((), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(labels_M), size):
            part = slice(start, start + size)
            ce, kl = checkpoint(
                self._losses, network.head, hidden_MD[part], taught_ME[part], labels_M[part], use_reentrant=False
            )
            total = total + (1 - self.weight) * ce + self.weight * self.temperature**2 * kl
            cross_entropy += ce.detach()
            divergence += kl.detach()
        return LossSums(total, cross_entropy, {"divergence_from_teacher": divergence})

    def _losses(self, head: OutputHead, hidden: Tensor, taught: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of cross-entropy and divergence over some tokens, in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = head(hidden.to(head.weight.dtype)).float()
            with torch.no_grad():
                theirs = self.teacher.lm_head(taught).float()
            size = min(logits.shape[-1], theirs.shape[-1])
            expected, found = (F.log_softmax(each[:, :size] / self.temperature, -1) for each in (theirs, logits))
            divergence = generalised_divergence(expected, found, self.beta)
            return F.cross_entropy(logits, labels, reduction="sum"), divergence

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The mean of the minimised loss, and the mean divergence from the teacher."""
        divergence = losses.measured["divergence_from_teacher"].item() / max(1, losses.num_tokens)
        return {"objective": losses.means()[0], "divergence_from_teacher": divergence}
