"""Advantages of tokens from rewards of answers: GRPO and its relatives, and PPO.

Shapes: N or B answers, T tokens of the longest. A `mask` (N, T) is True for tokens that the policy sampled; values
elsewhere are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from sheepop.posttrain.config import GRPOConfig, PPOConfig
from sheepop.posttrain.policy import ADVANTAGES, RETURNS, WEIGHTS
from sheepop.posttrain.rewards import Written

_LARGEST_ERROR = 0.2
_EPS = 1e-8


class RewardMethod(Protocol):
    """How rewards of a rollout become advantages, in PPO or GRPO. The last five methods have defaults."""

    def advantages(self, written: Written) -> list[float | None]:
        """The advantage of each answer as a whole; None for answers to leave out."""

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor | None, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """The numbers (N, T) that the objective reads per token, by name, except the log-probabilities.

        `log_p` is None if nothing reads it, this method included.
        """

    @property
    def reads_log_probabilities(self) -> bool:
        """Whether `numbers` needs the policy's log-probabilities of the answers."""
        return False

    @property
    def draws_again(self) -> bool:
        """Whether answers that are left out are replaced by answers to other prompts."""
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics of the last rollout."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state of a checkpoint, or resets it if `state` is empty."""
        return


class GroupPolicy(RewardMethod):
    """GRPO (Shao et al. 2024), RLOO (Ahmadian et al. 2024), Dr. GRPO (Liu et al. 2025) and DAPO (Yu et al. 2025).

    They differ in the baseline, in how a step averages, and in which answers are left out; `GRPOConfig` has a key for
    each.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self._largest_ratio: float | None = None

    def metrics(self) -> dict[str, float]:
        """The largest ratio of a token's probability in training to that in the sampler, if it is computed."""
        return {} if self._largest_ratio is None else {"sampler_ratio_max": self._largest_ratio}

    @property
    def draws_again(self) -> bool:
        """Whether groups of equal rewards are replaced by others."""
        return self._config.equal_groups == "draw_again"

    @property
    def reads_log_probabilities(self) -> bool:
        """Whether answers are weighted by the ratio of their probabilities in training to those in the sampler."""
        return self._config.sampler_ratio_cap is not None

    def advantages(self, written: Written) -> list[float | None]:
        """The advantage of each answer over its group; None for answers to leave out."""
        config, is_cut = self._config, ~torch.tensor(written.is_finished)
        penalised = torch.tensor(written.rewards, dtype=torch.float64) - is_cut.double() * config.missing_eos_penalty
        if config.overlong_buffer:
            most, lengths = config.max_new_tokens, torch.tensor(written.lengths, dtype=torch.float64)
            penalised -= config.overlong_penalty * overlong(lengths, most, config.overlong_buffer)
        rewards = penalised.view(-1, config.group_size)
        if config.baseline == "leave_one_out":
            found = leave_one_out_advantages(rewards)
        else:
            found = group_advantages(rewards, scaled=config.baseline == "scaled")
        is_left_out = rewards.isnan().flatten()
        if config.equal_groups != "keep":
            is_left_out |= _all_equal(rewards).expand_as(rewards).flatten()
        if config.truncated_answers == "leave_out":
            is_left_out |= is_cut
        pairs = zip(found.flatten().tolist(), is_left_out.tolist(), strict=True)
        return [None if left_out else advantage for advantage, left_out in pairs]

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor | None, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """Gives every token the advantage of its answer, and the weight of `loss_type`.

        With `sampler_ratio_cap` C the weight is multiplied by ``min(p / p_sampler, C)``, whose second probability is
        the sampler's (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
        Off-Policy RL Training").
        """
        advantages = torch.tensor(written.advantages)[:, None] * mask
        weights = mask.float()
        if self._config.loss_type == "grpo":
            weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
        elif self._config.loss_type == "dr_grpo":
            weights = weights / self._config.max_new_tokens
        if self._config.sampler_ratio_cap is not None:
            assert log_p is not None
            ratios = torch.where(mask, log_p - written.log_probabilities(mask), 0).exp()
            self._largest_ratio = float(ratios.max())
            weights = weights * ratios.clamp(max=self._config.sampler_ratio_cap)
        return {ADVANTAGES: advantages, WEIGHTS: weights}


def overlong(lengths: Tensor, most: int, buffer: int) -> Tensor:
    """The share of the penalty for long answers: from 0 up to ``most - buffer`` tokens evenly to 1 at `most`.

    `lengths` (N,) are in tokens. It is minus the soft punishment of DAPO (Yu et al. 2025, eq. 13).
    """
    return ((lengths - (most - buffer)) / buffer).clamp(0, 1)


def group_advantages(rewards: Tensor, *, scaled: bool = True, eps: float = 1e-6) -> Tensor:
    """Rewards (groups, answers) minus the mean of their group, divided by its standard deviation (Shao et al. 2024).

    Without `scaled` they are not divided (Dr. GRPO, Liu et al. 2025). Equal rewards have advantages of exactly 0. NaN
    stands for a missing reward, which does not count. Returns float64.
    """
    rewards = rewards.double()
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    count = rewards.isfinite().sum(1, keepdim=True)
    deviation = (centred.square().nansum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    found = centred / (deviation + eps) if scaled else centred
    return found.masked_fill(_all_equal(rewards), 0.0)


def _all_equal(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, (groups, 1); those that are missing do not count."""
    missing = rewards.isnan()
    most, least = rewards.masked_fill(missing, -torch.inf).amax(1), rewards.masked_fill(missing, torch.inf).amin(1)
    return (most <= least)[:, None]


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Rewards (groups, answers) minus the mean of the others in their group (RLOO, Ahmadian et al. 2024).

    Equal rewards have advantages of exactly 0. NaN stands for a missing reward, which does not count. Returns float64.
    """
    if rewards.shape[1] < 2:
        raise ValueError(
            f"the baseline is the mean of the other answers, so a group needs at least two, got {rewards.shape[1]}"
        )
    rewards = rewards.double()
    others = (rewards.isfinite().sum(1, keepdim=True) - 1).clamp(min=1)
    found = rewards - (rewards.nansum(dim=1, keepdim=True) - rewards) / others
    return found.masked_fill(_all_equal(rewards), 0.0)


class ProximalPolicy(RewardMethod):
    """PPO (Schulman et al. 2017): a value model, trained along with the policy, gives the baseline of every token.

    The last token of an answer gets its reward, in a conversation without the rewards of an environment for earlier
    turns, which the last tokens of these get. Every token gets a penalty for its divergence from the reference
    (Ziegler et al. 2019, eq. 2). `kl_target` adapts the coefficient of the penalty.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._kl_coef, self._seen = config.kl_coef, Moments()

    def advantages(self, written: Written) -> list[float | None]:
        """Keeps all answers with a reward; `numbers` computes the advantages of their tokens."""
        return [None if math.isnan(reward) else 0.0 for reward in written.rewards]

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor | None, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """Advantages and returns of every token."""
        config = self._config
        assert log_p is not None and values is not None
        divergence = torch.zeros_like(log_p) if reference is None else torch.where(mask, log_p - reference, 0)
        judged, earlier = torch.tensor(written.rewards, dtype=torch.float64), rewards_of_turns(written, mask)
        if config.normalise_rewards:
            self._seen = self._seen.and_more(judged)
            judged = self._seen.normalised(judged)
            earlier /= self._seen.deviation + _EPS
        penalties = torch.where(torch.tensor(written.is_finished), 0.0, config.missing_eos_penalty)
        rewards = token_rewards(judged - penalties - earlier.sum(1), mask, self._kl_coef * divergence - earlier)
        advantages, returns = generalised_advantages(
            rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        if config.kl_target is not None:
            self._adapt(float(divergence.sum() / len(written)), config.kl_target, len(written))
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {ADVANTAGES: advantages, RETURNS: returns, WEIGHTS: mask.float()}

    def _adapt(self, found: float, target: float, count: int) -> None:
        """Changes the coefficient in proportion to the error (Ziegler et al. 2019, section 2.2)."""
        error = min(max(found / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._kl_coef *= 1 + error * count / self._config.kl_horizon

    def metrics(self) -> dict[str, float]:
        """The coefficient of the divergence."""
        return {"kl_coef": self._kl_coef}

    def state(self) -> dict[str, Tensor]:
        """The coefficient of the divergence, and the moments of the rewards so far."""
        numbers = {"price": self._kl_coef, **asdict(self._seen)}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores both, or resets them if `state` is empty."""
        numbers = {name: float(number) for name, number in state.items()}
        self._kl_coef = numbers.pop("price", self._config.kl_coef)
        self._seen = Moments(**numbers)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared distances from the mean of numbers seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def and_more(self, values: Tensor) -> Moments:
        """The moments after adding `values` (N,) (Chan et al. 1979, eq. 2.1)."""
        number, mean = len(values), float(values.mean())
        count, apart = self.count + number, mean - self.mean
        squares = self.squares + float((values - mean).square().sum()) + apart**2 * self.count * number / count
        return Moments(count, self.mean + apart * number / count, squares)

    def normalised(self, values: Tensor) -> Tensor:
        """`values` minus the mean, divided by the standard deviation of the sample; 0 if all are equal."""
        return (values - self.mean) / (self.deviation + _EPS)

    @property
    def deviation(self) -> float:
        """The standard deviation of the sample."""
        return math.sqrt(self.squares / max(1.0, self.count - 1))


def rewards_of_turns(written: Written, mask: Tensor) -> Tensor:
    """The environment's rewards for all turns of a conversation but the last, at their last tokens (N, T)."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row, transcript in enumerate(written.transcripts):
        places = mask[row].nonzero()[:, 0]
        ends = torch.tensor([end - begin for begin, end in transcript.spans]).cumsum(0) - 1
        for end, reward in zip(ends[:-1], transcript.rewards, strict=False):
            found[row, places[end]] += reward
    return found


def token_rewards(rewards: Tensor, mask: Tensor, penalty: Tensor) -> Tensor:
    """Rewards (N, T) of tokens: minus the `penalty` (N, T), plus the answer's `rewards` (N,) at its last token."""
    found = torch.where(mask, -penalty, 0)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    found[torch.arange(len(mask)), last] += rewards.to(found)
    return found


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of tokens with `rewards` and estimated `values` (B, T).

    ``A_t = d_t + gamma gae_lambda A_{t+1}`` with ``d_t = r_t + gamma V_{t+1} - V_t``, where V is 0 after the last
    token (Schulman et al. 2016, eq. 16); returns are ``A + V``. Tokens of the mask need not be adjacent.
    """
    rewards, values = (torch.where(mask, x.float(), 0) for x in (rewards, values))
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = (rewards.new_zeros(len(rewards)) for _ in range(2))
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        found = error + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(mask[:, t], found, 0)
        next_advantage = torch.where(mask[:, t], found, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Normalises values to mean 0 and variance 1 over all tokens of the mask; 0 elsewhere.

    The variance is that of the sample, divided by n - 1. Fewer than two tokens are only centred.
    """
    count = mask.sum()
    kept = torch.where(mask, values.float(), 0)
    mean = kept.sum() / count.clamp(min=1)
    centred = torch.where(mask, kept - mean, 0)
    deviation = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + eps) if count > 1 else centred
