"""Proximal policy optimisation: tokens are judged by a value model that learns along (Schulman et al. 2017).

The reward of an answer comes with its last token; every token pays for how far it is from the reference (Ziegler et al.
2019, eq. 2). What a token is worth follows from both by generalised advantage estimation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sheepop.posttrain.advantages import generalised_advantages, whitened
from sheepop.posttrain.config import PPOConfig
from sheepop.posttrain.policy import ADVANTAGES, RETURNS, WEIGHTS
from sheepop.posttrain.rollouts import RewardMethod, Written

_LARGEST_ERROR = 0.2


class ProximalPolicy(RewardMethod):
    """PPO's reading of a rollout. With `divergence_target` the price of divergence is adapted to it."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._price = config.divergence_weight

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
        rewards = token_rewards(written, mask, self._price * divergence, config.missing_end_penalty)
        advantages, returns = generalised_advantages(
            rewards, values, mask, discount=config.discount, decay=config.decay
        )
        if config.divergence_target is not None:
            self._adapt(float(divergence.sum() / len(written)), config.divergence_target, len(written))
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {ADVANTAGES: advantages, RETURNS: returns, WEIGHTS: mask.float()}

    def _adapt(self, found: float, target: float, count: int) -> None:
        """Raises or lowers the price in proportion to the error (Ziegler et al. 2019, section 2.2)."""
        error = min(max(found / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._price *= 1 + error * count / self._config.divergence_horizon

    def metrics(self) -> dict[str, float]:
        """The price of divergence."""
        return {"divergence_weight": self._price}

    def state(self) -> dict[str, Tensor]:
        """The price of divergence."""
        return {"price": torch.tensor(self._price, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes it back, or begins anew."""
        self._price = float(state["price"]) if state else self._config.divergence_weight


def token_rewards(written: Written, mask: Tensor, price: Tensor, missing_end_penalty: float) -> Tensor:
    """The rewards (N, T) of tokens: minus the `price` of each, and with the last of an answer what that is worth."""
    rewards = torch.where(mask, -price, 0)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    for row, (reward, is_finished) in enumerate(zip(written.rewards, written.is_finished, strict=True)):
        rewards[row, last[row]] += reward - (0.0 if is_finished else missing_end_penalty)
    return rewards
