"""Learning from preferences without a reward model: the losses and objectives of the DPO family and KTO.

A completion y of prompt x has the log-probability ``log pi(y | x)``, the sum over its tokens. Losses are computed in
float32 at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.core.facts import counted
from sheepop.data import Batch
from sheepop.model import LossSums
from sheepop.posttrain.config import REFERENCE_FREE, PreferenceKind
from sheepop.posttrain.sequences import MeanLosses, answer_log_probabilities
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import Scores


@dataclass(frozen=True)
class Completions:
    """Log-probabilities of P completions under the policy and the reference (P,), and their numbers of tokens (P,).

    `reference` is None without a reference model.
    """

    policy: Tensor
    reference: Tensor | None
    lengths: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """``log pi(y | x) - log pi_ref(y | x)``."""
        if self.reference is None:
            raise ValueError("this loss needs the log-probabilities of a reference")
        return self.policy - self.reference

    @property
    def means(self) -> Tensor:
        """``log pi(y | x) / |y|``."""
        return self.policy / self.lengths


@dataclass(frozen=True)
class PreferenceLoss:
    """The losses of the DPO family.

    `beta` is the strength of the tie to the reference, or for SimPO and ORPO the weight of the preference.
    `label_smoothing` is the assumed share of pairs in the wrong order, for ``sigmoid`` and ``robust``; `margin` is
    SimPO's gamma.
    """

    kind: PreferenceKind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "kto":
            raise ValueError("kto has no pairs; its loss is kto_loss")

    def __call__(self, chosen: Completions, rejected: Completions) -> Tensor:
        """The loss of each pair (P,).

        - ``sigmoid``: ``-log s(h)`` with ``h = beta (r_c - r_r)`` and log-ratios r (Rafailov et al. 2023, eq. 7); with
          label smoothing e ``-(1 - e) log s(h) - e log s(-h)`` (Mitchell 2023).
        - ``robust``: ``(-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e)`` (Chowdhury et al. 2024).
        - ``hinge``: ``max(0, 1 - h)`` (Zhao et al. 2023, SLiC-HF).
        - ``ipo``: ``(d - 1 / (2 beta))^2``, d the difference of log-ratios per token (Azar et al. 2023, eq. 17).
        - ``simpo``: ``-log s(beta (m_c - m_r) - margin)`` with means m per token (Meng et al. 2024, eq. 6).
        - ``orpo``: ``-m_c - beta log s(o_c - o_r)`` with log-odds ``o = m - log(1 - e^m)`` (Hong et al. 2024, eq. 6).
        """
        if self.kind == "ipo":
            difference = chosen.log_ratios / chosen.lengths - rejected.log_ratios / rejected.lengths
            return (difference - 1 / (2 * self.beta)) ** 2
        if self.kind == "simpo":
            return -F.logsigmoid(self.beta * (chosen.means - rejected.means) - self.margin)
        if self.kind == "orpo":
            difference = log_odds(chosen.means) - log_odds(rejected.means)
            return -chosen.means - self.beta * F.logsigmoid(difference)
        h, wrong = self.beta * (chosen.log_ratios - rejected.log_ratios), self.label_smoothing
        if self.kind == "hinge":
            return F.relu(1 - h)
        if self.kind == "robust":
            return (-(1 - wrong) * F.logsigmoid(h) + wrong * F.logsigmoid(-h)) / (1 - 2 * wrong)
        return -(1 - wrong) * F.logsigmoid(h) - wrong * F.logsigmoid(-h)

    def rewards(self, completions: Completions) -> Tensor:
        """The implicit rewards of completions (P,), for metrics; without a gradient."""
        reference_free = self.kind in REFERENCE_FREE
        return self.beta * (completions.means if reference_free else completions.log_ratios).detach()


def log_odds(log_probabilities: Tensor) -> Tensor:
    """``log(p / (1 - p))`` for log p below 0, exact near 0 and 1."""
    return log_probabilities - torch.log(-torch.expm1(log_probabilities))


def kto_loss(
    completions: Completions,
    desirable: Tensor,
    divergence: Tensor,
    *,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The loss of each completion (P,), `desirable` (P,) or not (Ethayarajh et al. 2024, eq. 8).

    ``w (1 - s(beta (r - z)))`` for a desirable one and ``w (1 - s(beta (z - r)))`` for any other, with its log-ratio r
    and the `divergence` z of policy and reference, clamped to 0 and without a gradient. `weights` w are those of
    desirable and of other completions.
    """
    z = divergence.detach().clamp(min=0)
    away = completions.log_ratios - z
    signed = torch.where(desirable, away, -away)
    weight = torch.where(desirable, weights[0], weights[1]).to(away.dtype)
    return weight * (1 - torch.sigmoid(beta * signed))


@dataclass(frozen=True)
class PreferenceScores(Scores):
    """Means over held-out pairs, or over single answers with labels."""

    loss: float
    accuracy: float  # share of pairs in the right order, or of labelled answers with the right sign
    margin: float  # mean reward of chosen or desirable answers minus that of the others
    pairs: int
    calibration_error: float | None = None  # of reward models

    def __str__(self) -> str:
        calibration = "" if self.calibration_error is None else f", calibration error {self.calibration_error:.3f}"
        return f"loss {self.loss:.4f}, {self.accuracy:.1%} in the right order, margin {self.margin:.3f}{calibration}"

    @property
    def extent(self) -> str:
        """The number of pairs, in words."""
        return counted(self.pairs, "pair")

    def metrics(self) -> dict[str, float]:
        """The means."""
        return {name: value for name, value in asdict(self).items() if name != "pairs" and value is not None}

    def counts(self) -> dict[str, float]:
        """The number of pairs."""
        return {"pairs": self.pairs}

    @classmethod
    def of(cls, found: MeanLosses) -> PreferenceScores:
        """The scores from the sums that an objective of this file measured on a split."""
        rates = preference_metrics(found.measured, found.count)
        return cls(found.loss, rates["accuracy"], rates["margin"], found.count)


def preference_metrics(measured: Mapping[str, Tensor], count: int) -> dict[str, float]:
    """Means from the sums that the objectives measure: rewards of both sides, and the share in the right order."""
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
    """Sums over pairs for `preference_metrics`, from the rewards (P,) of both sides."""
    count = torch.full((), float(len(chosen)), device=chosen.device)
    return {
        "right": (chosen > rejected).sum().float(),
        "chosen": torch.stack((chosen.sum(), count)),
        "rejected": torch.stack((rejected.sum(), count)),
    }


@dataclass(frozen=True)
class PairwisePreference(Objective):
    """A loss of the DPO family, a mean over pairs.

    `supervised_weight` a adds ``-a log pi(chosen) / |chosen|`` to the loss of a pair (Pang et al. 2024, eq. 2).
    """

    loss: PreferenceLoss
    supervised_weight: float = 0.0

    def supervised(self, batch: Batch) -> int:
        """The number of pairs."""
        return len(batch.input_ids)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all pairs, in one forward pass over both answers."""
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
    """KTO: a mean over desirable and undesirable answers.

    The divergence from the reference is estimated on mismatched pairs of prompt and answer (see `GroupedExamples`): the
    mean over the micro-batch, at least 0.
    """

    beta: float
    weights: tuple[float, float]

    def supervised(self, batch: Batch) -> int:
        """The number of answers."""
        return len(batch.input_ids)

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all answers."""
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
        """As for pairs; an answer counts as right if its reward is positive when desirable, else negative."""
        return preference_metrics(losses.measured, losses.num_tokens)
