"""Learning from preferences without a reward model: the DPO family and KTO, as objectives of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sheepop.core.facts import counted
from sheepop.data import Batch
from sheepop.model import LossSums
from sheepop.posttrain.preference_losses import Completions, PreferenceLoss, kto_loss
from sheepop.posttrain.sequences import MeanLosses, answer_log_probabilities
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import Scores


@dataclass(frozen=True)
class PreferenceScores(Scores):
    """Means over held-out pairs, or over answers that were judged one by one."""

    loss: float
    accuracy: float  # share of pairs in the right order, or of judged answers on the right side of 0
    margin: float  # reward of the chosen, or wanted, answers above that of the others
    pairs: int
    calibration_error: float | None = None  # of reward models

    def __str__(self) -> str:
        calibration = "" if self.calibration_error is None else f", calibration error {self.calibration_error:.3f}"
        return f"loss {self.loss:.4f}, {self.accuracy:.1%} in the right order, margin {self.margin:.3f}{calibration}"

    @property
    def extent(self) -> str:
        """The pairs."""
        return counted(self.pairs, "pair")

    def metrics(self) -> dict[str, float]:
        """The means."""
        return {name: value for name, value in asdict(self).items() if name != "pairs" and value is not None}

    def counts(self) -> dict[str, float]:
        """The pairs."""
        return {"pairs": self.pairs}

    @classmethod
    def of(cls, found: MeanLosses) -> PreferenceScores:
        """The scores of what an objective of this file measured on a split."""
        rates = preference_metrics(found.measured, found.count)
        return cls(found.loss, rates["accuracy"], rates["margin"], found.count)


def preference_metrics(measured: Mapping[str, Tensor], count: int) -> dict[str, float]:
    """Means of what the objectives of this file sum up: rewards of both sides, and the share in the right order."""
    chosen, rejected = (_mean(measured, side) for side in ("chosen", "rejected"))
    return {
        "accuracy": float(measured["right"]) / max(1, count),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }


def _mean(measured: Mapping[str, Tensor], side: str) -> float:
    total, count = measured[side].tolist()
    return float(total / max(1, count))


def rewards_measured(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums over pairs of what `preference_metrics` takes means of, from the rewards (P,) of both sides."""
    count = torch.full((), float(len(chosen)), device=chosen.device)
    return {
        "right": (chosen > rejected).sum().float(),
        "chosen": torch.stack((chosen.sum(), count)),
        "rejected": torch.stack((rejected.sum(), count)),
    }


@dataclass(frozen=True)
class PairwisePreference(Objective):
    """A loss of the DPO family, a mean over pairs.

    With `supervised_weight` a the loss of a pair has ``-a log pi(chosen) / |chosen|`` added (Pang et al. 2024, eq. 2).
    """

    loss: PreferenceLoss
    supervised_weight: float = 0.0

    def supervised(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch.input_ids)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The losses of all pairs, summed, in one pass over both answers."""
        log_p, lengths = answer_log_probabilities(network, batch)
        reference = batch.given.get("reference")
        chosen, rejected = (
            Completions(log_p[:, side], None if reference is None else reference[:, side], lengths[:, side])
            for side in (0, 1)
        )
        losses = self.loss(chosen, rejected)
        if self.supervised_weight:
            losses = losses - self.supervised_weight * chosen.means
        total = losses.sum()
        measured = rewards_measured(self.loss.rewards(chosen), self.loss.rewards(rejected))
        return LossSums(total, total.detach(), measured)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """Rewards, their margin, and the share of pairs in the right order."""
        return preference_metrics(losses.measured, losses.num_tokens)


@dataclass(frozen=True)
class JudgedAnswers(Objective):
    """KTO: a mean over answers that are wanted or not, each beside another prompt's answer (see `GroupedExamples`).

    The divergence is the mean over the answers of a micro-batch, at least 0.
    """

    beta: float
    weights: tuple[float, float]

    def supervised(self, batch: Batch) -> int:
        """Answers."""
        return len(batch.input_ids)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The losses of all answers, summed."""
        log_p, lengths = answer_log_probabilities(network, batch)
        own, other = (
            Completions(log_p[:, side], batch.given["reference"][:, side], lengths[:, side]) for side in (0, 1)
        )
        desirable = batch.given["values"] > 0
        divergence = other.log_ratios.detach().mean()
        total = kto_loss(own, desirable, divergence, beta=self.beta, weights=self.weights).sum()
        rewards = self.beta * own.log_ratios.detach()
        sides = {
            name: torch.stack((rewards[chosen].sum(), chosen.sum().float()))
            for name, chosen in (("chosen", desirable), ("rejected", ~desirable))
        }
        right = torch.where(desirable, rewards > 0, rewards < 0).sum().float()
        return LossSums(total, total.detach(), {"right": right, **sides})

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """As of pairs; an answer is on the right side where its reward has the sign that it should."""
        return preference_metrics(losses.measured, losses.num_tokens)
