"""Proximal policy optimisation: tokens are judged by a value model that learns along (Schulman et al. 2017).

The reward of an answer comes with its last token; every token pays for how far it is from the reference (Ziegler et al.
2019, eq. 2). What a token is worth follows from both by generalised advantage estimation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sheepop.posttrain.advantages import generalised_advantages, whitened
from sheepop.posttrain.config import PPOConfig
from sheepop.posttrain.policy import ADVANTAGES, RETURNS, WEIGHTS
from sheepop.posttrain.rollouts import RewardMethod
from sheepop.posttrain.written import Written

_LARGEST_ERROR = 0.2
_EPS = 1e-8


class ProximalPolicy(RewardMethod):
    """PPO's reading of a rollout. With `kl_target` the price of divergence is adapted to it."""

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
