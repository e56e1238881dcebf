"""Learning from preferences: the losses and objectives of the DPO family, of KTO, and of reward models.

A completion y of prompt x has the log-probability ``log pi(y | x)``, the sum over its tokens. Losses are computed in
float32 at least. A reward model is a network with a scalar head that rates answers, trained on pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.adapt.scalar_head import REWARD_HEAD, scalar_head
from sheepop.core.facts import counted
from sheepop.data import Batch, Batches
from sheepop.model import IGNORE_INDEX, LossSums, Transformer
from sheepop.posttrain.config import REFERENCE_FREE, PreferenceKind
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network
from sheepop.train.precision import autocast
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork, MeanLosses, Scores

_BINS = 10  # of the confidence of a reward model


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
        return self.beta * (completions.means if self.kind in REFERENCE_FREE else completions.log_ratios).detach()


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
    sums = (measured[side].tolist() for side in ("chosen", "rejected"))
    chosen, rejected = (float(total / max(1, number)) for total, number in sums)
    return {
        "accuracy": float(measured["right"]) / max(1, count),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }


def _measured(chosen: Tensor, rejected: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Sums for `preference_metrics`: of the rewards of both sides with their numbers, and of what is `right`."""
    sides = {"chosen": chosen, "rejected": rejected}
    sums = {name: torch.stack((side.sum(), side.new_tensor(len(side)))) for name, side in sides.items()}
    return {"right": right.sum().float(), **sums}


def answer_log_probabilities(network: Network, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """``log pi(y | x)`` of answers y, summed in float32, and their lengths in tokens.

    Both are (P, G) for P groups of G answers, (P,) for P rows.
    """
    labels = batch.labels.flatten(0, -2)
    log_p = network.head.log_probabilities(network.hidden_states(batch.rows), labels, batch.supervised)
    shape = batch.labels.shape[:-1]
    return log_p.sum(-1).view(shape), (labels != IGNORE_INDEX).sum(-1).view(shape)


@torch.no_grad()
def log_probabilities_of(
    model: Transformer,
    batches: Batches,
    *,
    batch_size: int,
    precision: str,
    device: str,
    on_batch: Callable[[int], None] = lambda done: None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The log-probabilities (groups, G) of all answers of a split under a finished model, without gradients."""
    found, network = [], FinishedNetwork(model)
    for start in range(0, batches.num_samples, batch_size):
        indices = np.arange(start, min(batches.num_samples, start + batch_size))
        batch = TensorBatch.from_numpy(batches.batch(indices), device)
        with autocast(device, precision):
            found.append(answer_log_probabilities(network, batch)[0].float().cpu())
        on_batch(len(indices))
    return torch.cat(found).numpy() if found else np.zeros((0, 2), np.float32)


class _PreferenceObjective(Objective):
    """A mean over pairs, or over answers with labels."""

    def supervised(self, batch: Batch) -> int:
        """The number of pairs or answers."""
        return len(batch.input_ids)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """Rewards, their margin, and the share in the right order; of answers with labels, that with the right sign."""
        return preference_metrics(losses.measured, losses.num_tokens)


@dataclass(frozen=True)
class PairwisePreference(_PreferenceObjective):
    """The sum of weighted losses of the DPO family, a mean over pairs; the rewards measured are those of the first.

    `supervised_weight` a adds ``-a log pi(chosen) / |chosen|`` to the loss of a pair (Pang et al. 2024, eq. 2).
    """

    losses: Sequence[tuple[float, PreferenceLoss]]
    supervised_weight: float = 0.0

    def of_pairs(self, chosen: Completions, rejected: Completions) -> Tensor:
        """The loss of each pair (P,)."""
        found = torch.stack([weight * loss(chosen, rejected) for weight, loss in self.losses]).sum(0)
        return found - self.supervised_weight * chosen.means if self.supervised_weight else found

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all pairs, in one forward pass over both answers."""
        log_p, lengths = answer_log_probabilities(network, batch)
        reference = batch.given.get("reference")
        chosen, rejected = (
            Completions(log_p[:, side], None if reference is None else reference[:, side], lengths[:, side])
            for side in (0, 1)
        )
        total = self.of_pairs(chosen, rejected).sum()
        better, worse = (self.losses[0][1].rewards(each) for each in (chosen, rejected))
        return LossSums(total, total.detach(), _measured(better, worse, better > worse))


@dataclass(frozen=True)
class JudgedAnswers(_PreferenceObjective):
    """KTO: a mean over desirable and undesirable answers.

    The `divergence` from the reference is estimated on mismatched pairs of prompt and answer (see `GroupedExamples`):
    their mean log-ratio over the whole step and all ranks, at least 0.
    """

    beta: float
    weights: tuple[float, float]
    divergence: Tensor | None = None

    def of_step(
        self, network: Network, batches: Iterable[TensorBatch], total: Callable[[Tensor], Tensor]
    ) -> JudgedAnswers:
        """The objective with the divergence of the step."""
        sums = torch.zeros(2, dtype=torch.float64, device=network.head.weight.device)
        for batch in batches:
            log_p, _ = answer_log_probabilities(network, batch.member(1))
            sums += torch.stack(((log_p - batch.given["reference"][:, 1]).double().sum(), sums.new_tensor(len(log_p))))
        sum_of_all, count = total(sums)
        return replace(self, divergence=(sum_of_all / count.clamp(min=1)).float())

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all answers."""
        if self.divergence is None:
            raise ValueError("the loss needs the divergence of the step; call of_step first")
        log_p, lengths = answer_log_probabilities(network, batch.member(0))
        own = Completions(log_p, batch.given["reference"][:, 0], lengths)
        desirable = batch.given["values"] > 0
        total = kto_loss(own, desirable, self.divergence, beta=self.beta, weights=self.weights).sum()
        rewards = self.beta * own.log_ratios.detach()
        right = torch.where(desirable, rewards > 0, rewards < 0)
        return LossSums(total, total.detach(), _measured(rewards[desirable], rewards[~desirable], right))


def pairwise_reward_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """``-log s(r_c - r_r - margin) + centring (r_c + r_r)^2`` for each pair (P,).

    Bradley and Terry 1952; the margin is of Touvron et al. 2023 (Llama 2), eq. 2; the penalty that keeps rewards near 0
    is of Eisenstein et al. 2023, section 3.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected).square() if centring else loss


@dataclass(frozen=True)
class PairwiseReward(_PreferenceObjective):
    """Bradley and Terry's loss on the rewards of pairs, a mean over pairs; see `pairwise_reward_loss`.

    With `margins` the values of the pairs are the margins by which chosen answers must be better.
    """

    centring: float
    margins: bool

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sum of the losses of all pairs, in one forward pass over both answers."""
        hidden = network.hidden_states(batch.rows)  # (P G, T, D)
        last = (batch.given["lengths"].flatten() - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        states = hidden.gather(1, last).view(*batch.labels.shape[:2], -1)
        chosen, rejected = scalar_head(network.modules, REWARD_HEAD)(states).unbind(1)
        margin = batch.given["values"] if self.margins else 0.0
        total = pairwise_reward_loss(chosen, rejected, margin=margin, centring=self.centring).sum()
        found = chosen.detach(), rejected.detach()
        measured = _measured(*found, chosen > rejected)
        return LossSums(total, total.detach(), measured | {"calibration": _calibration(*found)})


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
