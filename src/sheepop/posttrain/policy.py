"""The objective of PPO, GRPO and their relatives: a policy learns from rewards of its own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.adapt.scalar_head import VALUE_HEAD, VALUE_MODEL, scalar_head
from sheepop.core.facts import counted
from sheepop.data import Batch
from sheepop.data.batches import WholeRows
from sheepop.model import IGNORE_INDEX, LossSums
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Network
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import Scores

Unit = Literal["token", "answer"]
Divergence = Literal["k1", "k2", "k3"]
Surrogate = Literal["clipped", "cispo"]
OLD, REFERENCE, ADVANTAGES, WEIGHTS = "old_log_probabilities", "reference_log_probabilities", "advantages", "weights"
VALUES, RETURNS = "old_values", "returns"


@dataclass(frozen=True, eq=False)
class AnswerBatch(WholeRows):
    """Answers of a policy after their prompts, padded at the end, with named `numbers` (B, T) for each label.

    A row is one document, or several if the policy has read parts of a conversation anew.
    """

    lengths: NDArray[np.int64]
    numbers: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        input_ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        lengths: NDArray[np.int64],
        numbers: Mapping[str, NDArray[np.float32]],
        document_ids: NDArray[np.int64] | None = None,
    ) -> AnswerBatch:
        """A batch of rows; `lengths` (B,) counts tokens without padding. By default each row is one document."""
        positions = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
        if document_ids is None or not document_ids.any():
            return cls(input_ids, labels, positions, np.zeros_like(input_ids), False, lengths, numbers)
        begins = np.diff(document_ids, prepend=document_ids[:, :1]) != 0
        positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        return cls(input_ids, labels, positions, document_ids, True, lengths, numbers)

    def given(self) -> dict[str, NDArray[Any]]:
        """The numbers."""
        return dict(self.numbers)

    def rows(self, chosen: NDArray[np.int64] | slice) -> AnswerBatch:
        """Selects answers and cuts off the padding that all of them share."""
        lengths = self.lengths[chosen]
        cut = chosen, slice(int(lengths.max(initial=1)))
        numbers = {name: values[cut] for name, values in self.numbers.items()}
        return AnswerBatch.of(self.input_ids[cut], self.labels[cut], lengths, numbers, self.document_ids[cut])


def no_numbers(shape: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    """Zeros for every number that the objective may read, for rows without labels."""
    return {name: np.zeros(shape, np.float32) for name in (ADVANTAGES, WEIGHTS, OLD, REFERENCE, VALUES, RETURNS)}


def clipped_policy_loss(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """``max(-A rho, -A clip(rho, 1 - low, 1 + high))`` with ``rho = pi / pi_old``, and where it was clipped (B, T).

    Schulman et al. 2017, eq. 7; a higher upper bound as in DAPO (Yu et al. 2025). `log_ratios` are ``log rho``.
    """
    ratio, advantages = log_ratios.exp(), advantages.detach()
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), bounded > free


def bounded_weight_loss(
    log_probabilities: Tensor, log_ratios: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """CISPO's ``-A clip(rho, 1 - low, 1 + high) log pi``, and where rho was clipped (B, T).

    MiniMax 2025 (MiniMax-M1), eq. 4. The clipped ratio has no gradient, so that no token is left out.
    """
    ratio = log_ratios.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages.detach() * weight * log_probabilities, weight != ratio


def means_of_answers(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each answer's tokens, at each of its tokens (B, T); answers are where the mask is True.

    Of log-ratios, it is the logarithm of GSPO's ratio of an answer (Zheng et al. 2025, eq. 7).
    """
    means = torch.where(mask, values, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return means.expand_as(values)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """``max((V - R)^2, (V_c - R)^2) / 2`` with ``V_c = clip(V, V_old - c, V_old + c)``; None does not clip.

    The clipping comes from the code of Schulman et al. 2017; Engstrom et al. 2020, section 2, describe it.
    """
    returns, old_values = returns.detach(), old_values.detach()
    free = (values - returns).square()
    if clip is None:
        return free / 2
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(free, (bounded - returns).square()) / 2


def divergence(log_ratios: Tensor, kind: Divergence) -> Tensor:
    """Estimates KL(policy, reference) for each token, from ``log pi - log pi_ref`` of tokens that the policy sampled.

    k1 is the log-ratio itself; k2, half its square, has the gradient of the divergence; k3, ``e^-r - 1 + r``, is never
    negative and has k1's expectation (Schulman 2020, "Approximating KL divergence").
    """
    if kind == "k1":
        return log_ratios
    if kind == "k2":
        return log_ratios.square() / 2
    return torch.expm1(-log_ratios) + log_ratios


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The clipped surrogate of PPO or its relatives with additional terms, for every token of an answer.

    - the `surrogate` with `clip_low` and `clip_high` (see `clipped_policy_loss` and `bounded_weight_loss`), of the
      ratios of tokens, or with `of_answers` of whole answers (see `means_of_answers`);
    - `kl_coef` times the divergence from the reference that `estimator` gives (Shao et al. 2024, eq. 3);
    - `vf_coef` times the loss of the value model (see `clipped_value_loss`);
    - ``entropy_coef (log pi)^2 / 2``, whose expected gradient over the policy's samples is that of the negative
      entropy.

    Log-probabilities are of logits divided by `temperature`, at which answers are sampled. A step is a mean over
    tokens or over answers (`unit`); the `WEIGHTS` weight the tokens of an answer.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    estimator: Divergence = "k3"
    vf_coef: float = 0.0
    value_clip: float | None = None
    unit: Unit = "token"
    surrogate: Surrogate = "clipped"
    of_answers: bool = False

    def supervised(self, batch: Batch) -> int:
        """The number of labels, or of answers that have any."""
        return batch.num_labels if self.unit == "token" else int((batch.labels != IGNORE_INDEX).any(-1).sum())

    def log_probabilities(self, network: Network, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """``log pi`` of every label (B, T), 0 without a label, and the hidden states (B, T, D)."""
        hidden = network.hidden_states(batch.inputs)
        scaled = hidden if self.temperature == 1.0 else hidden / self.temperature
        return network.head.log_probabilities(scaled, batch.labels, batch.supervised), hidden

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The weighted sum of the losses of all tokens."""
        log_p, hidden = self.log_probabilities(network, batch)
        mask, given = batch.labels != IGNORE_INDEX, batch.given
        old = given.get(OLD, log_p.detach())
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        log_ratios = log_p - old.detach()
        if self.of_answers:
            log_ratios = means_of_answers(log_ratios, mask)
        if self.surrogate == "cispo":
            losses, is_clipped = bounded_weight_loss(log_p, log_ratios, given[ADVANTAGES], **bounds)
        else:
            losses, is_clipped = clipped_policy_loss(log_ratios, given[ADVANTAGES], **bounds)
        measured = {
            "policy_loss": losses,
            "clipped": is_clipped,
            "entropy": -log_p,
            # Of the old policy, which sampled the tokens, from the new one.
            "divergence_from_old": divergence(old - log_p, "k3"),
        }
        if self.entropy_coef:
            losses = losses + self.entropy_coef * log_p.square() / 2
        if self.kl_coef:
            losses = losses + self.kl_coef * divergence(log_p - given[REFERENCE], self.estimator)
        if self.vf_coef:
            values = predicted_values(network, batch, hidden)
            of_values = clipped_value_loss(values, given[VALUES], given[RETURNS], clip=self.value_clip)
            measured["value_loss"] = of_values
            losses = losses + self.vf_coef * of_values
        total = torch.where(mask, losses * given[WEIGHTS], 0).sum()
        sums = {name: torch.where(mask, value.detach().float(), 0).sum() for name, value in measured.items()}
        return LossSums(total, total.detach(), {**sums, "tokens": mask.sum().float()})

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """Means over the tokens of the step."""
        count = max(1.0, losses.measured["tokens"].item())
        return {name: value.item() / count for name, value in losses.measured.items() if name != "tokens"}


def predicted_values(network: Network, batch: TensorBatch, hidden: Tensor) -> Tensor:
    """The value at every position (B, T), from the policy's hidden states or from a separate value network."""
    own = getattr(network.modules, VALUE_MODEL, None)
    if own is None:
        return scalar_head(network.modules, VALUE_HEAD)(hidden)
    return scalar_head(own, VALUE_HEAD)(own.hidden_states(**batch.inputs))


@dataclass(frozen=True)
class RewardScores(Scores):
    """Means over answers to held-out prompts."""

    loss: float  # minus the reward, or the divergence from a teacher
    reward: float | None
    length: float
    truncated: float  # share of answers cut off at the limit
    repetition: float
    completions: int

    def __str__(self) -> str:
        judged = f"divergence {self.loss:.4f}" if self.reward is None else f"reward {self.reward:.4f}"
        return (
            f"{judged}, {self.length:,.1f} tokens an answer, {self.truncated:.1%} cut off, "
            f"{self.repetition:.1%} repeated"
        )

    @classmethod
    def of(cls, loss: float, written: Mapping[str, float], count: int) -> RewardScores:
        """The scores of `count` answers with these means."""
        means = {name: written[name] for name in ("length", "truncated", "repetition")}
        return cls(loss=loss, reward=written.get("reward"), completions=count, **means)

    @property
    def extent(self) -> str:
        """The number of answers, in words."""
        return counted(self.completions, "answer")

    def metrics(self) -> dict[str, float]:
        """The means."""
        found = {name: value for name, value in asdict(self).items() if name != "completions" and value is not None}
        return found if self.reward is not None else {**found, "divergence_from_teacher": self.loss}

    def counts(self) -> dict[str, float]:
        """The number of answers."""
        return {"completions": self.completions}


def repetition(token_ids: Sequence[int], order: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text."""
    grams = [tuple(token_ids[start : start + order]) for start in range(len(token_ids) - order + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
