"""How much better a token or a completion was than expected, for policies that learn from rewards.

Shapes: B completions, T tokens of the longest. `mask` (B, T) is True where a token was written by the policy; what
stands elsewhere counts for nothing, whatever it is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["k1", "k2", "k3"]


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


def divergence(log_ratios: Tensor, kind: Divergence) -> Tensor:
    """Estimates of KL(policy, reference) for each token, from ``log pi - log pi_ref`` of tokens that the policy wrote.

    k1 is the log-ratio itself; k2, half its square, has the gradient of the divergence; k3, ``e^-r - 1 + r``, is never
    negative and has k1's expectation (Schulman 2020, "Approximating KL divergence").
    """
    if kind == "k1":
        return log_ratios
    if kind == "k2":
        return log_ratios.square() / 2
    return torch.expm1(-log_ratios) + log_ratios
