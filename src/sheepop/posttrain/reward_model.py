"""Reward models: a network with a scalar head that rates answers, trained on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sheepop.adapt.scalar_head import REWARD_HEAD, scalar_head
from sheepop.data import Batch
from sheepop.model import LossSums, Transformer
from sheepop.posttrain.preference import PreferenceScores, preference_metrics, rewards_measured
from sheepop.posttrain.sequences import MeanLosses, last_states
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch

_BINS = 10


def pairwise_reward_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """``-log s(r_c - r_r - margin) + centring (r_c + r_r)^2`` for each pair (P,).

    Bradley and Terry 1952; the margin is of Touvron et al. 2023 (Llama 2), eq. 2; the penalty that keeps rewards near 0
    is of Eisenstein et al. 2023, section 3.
    """
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected).square() if centring else loss


@dataclass(frozen=True)
class PairwiseReward(Objective):
    """Bradley and Terry's loss on the rewards of pairs, a mean over pairs; see `pairwise_reward_loss`.

    With `margins` the values of the pairs are the margins by which chosen answers must be better.
    """

    centring: float
    margins: bool

    def supervised(self, batch: Batch) -> int:
        """The number of pairs."""
        return len(batch.input_ids)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all pairs, in one forward pass over both answers."""
        chosen, rejected = scalar_head(network.modules, REWARD_HEAD)(last_states(network, batch)).unbind(1)
        margin = batch.given["values"] if self.margins else 0.0
        total = pairwise_reward_loss(chosen, rejected, margin=margin, centring=self.centring).sum()
        found = chosen.detach(), rejected.detach()
        measured = rewards_measured(*found) | {"calibration": _calibration(*found)}
        return LossSums(total, total.detach(), measured)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """Rewards, their margin, and the share of pairs in the right order."""
        return preference_metrics(losses.measured, losses.num_tokens)


def _calibration(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Sums of pairs, confidences and right orders (3, bins), binned by the model's confidence in its order."""
    confidence = torch.sigmoid((chosen - rejected).abs())  # from 1/2 to 1
    bins = ((confidence - 0.5) * 2 * _BINS).long().clamp(max=_BINS - 1)
    right = (chosen > rejected).to(confidence.dtype)
    sums = confidence.new_zeros(3, _BINS)
    return sums.index_add_(1, bins, torch.stack((torch.ones_like(confidence), confidence, right)))


def reward_scores(found: MeanLosses) -> PreferenceScores:
    """The scores of a reward model, with its expected calibration error (Guo et al. 2017, eq. 3)."""
    count, confidence, right = found.measured["calibration"]
    error = ((confidence - right).abs().sum() / count.sum().clamp(min=1)).item()
    return replace(PreferenceScores.of(found), calibration_error=error)


@torch.no_grad()
def answer_rewards(model: Transformer, rows: Sequence[Sequence[int]], *, batch_size: int, pad_id: int) -> Tensor:
    """The rewards (N,) of answers, each after its prompt, from a reward model in evaluation mode."""
    found = []
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        length = max(map(len, some))
        ids = torch.full((len(some), length), pad_id, dtype=torch.int64)
        for number, row in enumerate(some):
            ids[number, : len(row)] = torch.tensor(row)
        hidden = model.hidden_states(ids.to(model.device))
        last = torch.tensor([len(row) - 1 for row in some], device=model.device)
        found.append(scalar_head(model, REWARD_HEAD)(hidden[torch.arange(len(some), device=model.device), last]))
    return torch.cat(found).float().cpu() if found else torch.zeros(0)
