"""How rewards of completions become advantages of tokens: PPO, and GRPO with its relatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from sheepop.posttrain.config import GRPOConfig, PPOConfig
from sheepop.posttrain.policy import ADVANTAGES, RETURNS, WEIGHTS
from sheepop.posttrain.written import Written

_LARGEST_ERROR = 0.2
_EPS = 1e-8


class RewardMethod(Protocol):
    """What PPO and GRPO differ in: what the rewards of a rollout mean for every token. The last four have a body."""

    def advantages(self, written: Written) -> list[float | None]:
        """What the rewards say of every answer as a whole; None where it is not learnt from."""

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """What the objective reads of each token (N, T) beside the log-probabilities; `mask` (N, T) is of labels."""

    @property
    def draws_again(self) -> bool:
        """Whether other prompts take the place of answers that are not learnt from."""
        return False

    def metrics(self) -> dict[str, float]:
        """What it has measured of the last rollout."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What it remembers."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes it back."""
        return


class GroupPolicy(RewardMethod):
    """GRPO (Shao et al. 2024), RLOO (Ahmadian et al. 2024), Dr. GRPO (Liu et al. 2025) and DAPO (Yu et al. 2025).

    They differ in the baseline, in how a step averages, and in which answers are left out; `GRPOConfig` has a key for
    each.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config

    @property
    def draws_again(self) -> bool:
        """Where groups of equal rewards are replaced by others."""
        return self._config.equal_groups == "draw_again"

    def advantages(self, written: Written) -> list[float | None]:
        """How much better every answer is than its group; None where it is not learnt from."""
        config = self._config
        penalty = config.missing_eos_penalty
        rewards = torch.tensor(
            [
                reward - (0.0 if is_finished else penalty)
                for reward, is_finished in zip(written.rewards, written.is_finished, strict=True)
            ]
        ).view(-1, config.group_size)
        if config.baseline == "leave_one_out":
            found = leave_one_out_advantages(rewards)
        else:
            found = group_advantages(rewards, scaled=config.baseline == "scaled")
        is_equal = (rewards == rewards[:, :1]).all(1, keepdim=True).expand_as(rewards).flatten()
        return [
            None
            if (equal and config.equal_groups != "keep")
            or (not is_finished and config.truncated_answers == "leave_out")
            else advantage
            for advantage, equal, is_finished in zip(
                found.flatten().tolist(), is_equal.tolist(), written.is_finished, strict=True
            )
        ]

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """Every token of an answer has its advantage, and the weight that `loss_type` gives it."""
        advantages = torch.tensor(written.advantages)[:, None] * mask
        weights = mask.float()
        if self._config.loss_type == "grpo":
            weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
        elif self._config.loss_type == "dr_grpo":
            weights = weights / self._config.max_new_tokens
        return {ADVANTAGES: advantages, WEIGHTS: weights}


def group_advantages(rewards: Tensor, *, scaled: bool = True, eps: float = 1e-6) -> Tensor:
    """Rewards (groups, completions) less the mean of their group, `scaled` to its deviation (Shao et al. 2024, GRPO).

    Without `scaled` as Dr. GRPO has it (Liu et al. 2025). A group of equal rewards has advantages of 0.
    """
    centred = rewards.float() - rewards.float().mean(dim=1, keepdim=True)
    if not scaled:
        return centred
    return centred / (rewards.float().std(dim=1, keepdim=True) + eps)


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Rewards (groups, completions) less the mean of the others in their group (Ahmadian et al. 2024, RLOO)."""
    count = rewards.shape[1]
    if count < 2:
        raise ValueError(f"the others of a group are its baseline, so it needs two completions at least, got {count}")
    rewards = rewards.float()
    return rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / (count - 1)


class ProximalPolicy(RewardMethod):
    """PPO (Schulman et al. 2017): a value model that learns along gives the baseline of every token.

    The last token of an answer gets its reward; every token pays for its divergence from the reference (Ziegler et al.
    2019, eq. 2). `kl_target` adapts the coefficient of that penalty.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._price, self._seen = config.kl_coef, Moments()

    def advantages(self, written: Written) -> list[float | None]:
        """All answers are learnt from; what their tokens are worth is said by `numbers`."""
        return [0.0] * len(written)

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        """Advantages and returns of every token."""
        config = self._config
        assert values is not None
        divergence = torch.zeros_like(log_p) if reference is None else torch.where(mask, log_p - reference, 0)
        judged = torch.tensor(written.rewards, dtype=torch.float64)
        if config.normalise_rewards:
            self._seen = self._seen.and_more(judged)
            judged = self._seen.normalised(judged)
        penalties = torch.where(torch.tensor(written.is_finished), 0.0, config.missing_eos_penalty)
        rewards = token_rewards(judged - penalties, mask, self._price * divergence)
        advantages, returns = generalised_advantages(
            rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        if config.kl_target is not None:
            self._adapt(float(divergence.sum() / len(written)), config.kl_target, len(written))
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {ADVANTAGES: advantages, RETURNS: returns, WEIGHTS: mask.float()}

    def _adapt(self, found: float, target: float, count: int) -> None:
        """Raises or lowers the price in proportion to the error (Ziegler et al. 2019, section 2.2)."""
        error = min(max(found / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._price *= 1 + error * count / self._config.kl_horizon

    def metrics(self) -> dict[str, float]:
        """The price of divergence."""
        return {"kl_coef": self._price}

    def state(self) -> dict[str, Tensor]:
        """The price of divergence, and the moments of the rewards so far."""
        numbers = {"price": self._price, **asdict(self._seen)}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes it back, or begins anew."""
        numbers = {name: float(number) for name, number in state.items()}
        self._price = numbers.pop("price", self._config.kl_coef)
        self._seen = Moments(**numbers)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared distances from the mean of numbers seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def and_more(self, values: Tensor) -> Moments:
        """With `values` (N,) seen too (Chan et al. 1979, eq. 2.1)."""
        number, mean = len(values), float(values.mean())
        count, apart = self.count + number, mean - self.mean
        squares = self.squares + float((values - mean).square().sum()) + apart**2 * self.count * number / count
        return Moments(count, self.mean + apart * number / count, squares)

    def normalised(self, values: Tensor) -> Tensor:
        """`values` less the mean, over the deviation of the sample; equal ones are 0."""
        deviation = math.sqrt(self.squares / max(1.0, self.count - 1))
        return (values - self.mean) / (deviation + _EPS)


def token_rewards(rewards: Tensor, mask: Tensor, price: Tensor) -> Tensor:
    """Rewards (N, T) of tokens: each pays its `price`, and an answer's last gets what it is worth, `rewards` (N,)."""
    found = torch.where(mask, -price, 0)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    found[torch.arange(len(mask)), last] += rewards.to(found)
    return found


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) of tokens with `rewards` and estimated `values` (B, T).

    ``A_t = d_t + gamma gae_lambda A_{t+1}`` with ``d_t = r_t + gamma V_{t+1} - V_t``, where V is 0 behind the last
    token (Schulman et al. 2016, eq. 16); returns are ``A + V``. Tokens that are not masked need not be neighbours.
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


def whitened(values: Tensor, mask: Tensor, *, keep_mean: bool = False, eps: float = 1e-8) -> Tensor:
    """Values with mean 0 and variance 1 over all tokens of the mask, 0 elsewhere; with `keep_mean` the mean stays.

    The variance is that of the sample, divided by n - 1. Fewer than two tokens are only centred.
    """
    count = mask.sum()
    kept = torch.where(mask, values.float(), 0)
    mean = kept.sum() / count.clamp(min=1)
    centred = torch.where(mask, kept - mean, 0)
    deviation = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
    scaled = centred / (deviation + eps) if count > 1 else centred
    return torch.where(mask, scaled + mean, 0) if keep_mean else scaled
