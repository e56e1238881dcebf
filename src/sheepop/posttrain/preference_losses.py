"""Losses on pairs of a chosen and a rejected completion, from the log-probabilities of both.

A completion y of prompt x has the log-probability ``log pi(y | x)``, the sum over its tokens. All arithmetic is in
float32 at least, and every function gives one loss for each pair (P,), or for each completion where there are no pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.posttrain.config import REFERENCE_FREE, PreferenceKind


@dataclass(frozen=True)
class Completions:
    """Log-probabilities of P completions under the policy and the reference (P,), and their tokens (P,).

    `reference` is None where no reference is asked.
    """

    policy: Tensor
    reference: Tensor | None
    lengths: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """``log pi(y | x) - log pi_ref(y | x)``."""
        if self.reference is None:
            raise ValueError("this loss compares with a reference, and there is none")
        return self.policy - self.reference

    @property
    def means(self) -> Tensor:
        """``log pi(y | x) / |y|``."""
        return self.policy / self.lengths


@dataclass(frozen=True)
class PreferenceLoss:
    """The losses of the DPO family.

    `beta` is the strength of the tie to the reference, or for SimPO and ORPO the weight of the preference.
    `label_smoothing` is the share of pairs whose order is thought to be wrong, of ``sigmoid`` and ``robust``; `margin`
    is SimPO's gamma.
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
        """What the policy implicitly thinks a completion is worth (P,), for the record; without a gradient."""
        reference_free = self.kind in REFERENCE_FREE
        return self.beta * (completions.means if reference_free else completions.log_ratios).detach()


def log_odds(log_probabilities: Tensor) -> Tensor:
    """``log(p / (1 - p))`` for log p below 0, exact near both ends."""
    return log_probabilities - torch.log(-torch.expm1(log_probabilities))


def kto_loss(
    completions: Completions,
    desirable: Tensor,
    divergence: Tensor,
    *,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The loss of each completion (P,), some `desirable` (P,) and some not (Ethayarajh et al. 2024, eq. 8).

    ``w (1 - s(beta (r - z)))`` for a desirable one and ``w (1 - s(beta (z - r)))`` for any other, with its log-ratio r
    and the `divergence` z of policy and reference, which is no less than 0 and has no gradient. `weights` are those of
    desirable and other completions.
    """
    z = divergence.detach().clamp(min=0)
    away = completions.log_ratios - z
    signed = torch.where(desirable, away, -away)
    weight = torch.where(desirable, weights[0], weights[1]).to(away.dtype)
    return weight * (1 - torch.sigmoid(beta * signed))
