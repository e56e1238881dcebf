"""Losses of policies and value models that learn from their own completions.

Shapes: B completions, T tokens. All give one number for each token (B, T); whoever calls masks and averages them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    log_probabilities: Tensor,
    old_log_probabilities: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """``max(-A rho, -A clip(rho, 1 - low, 1 + high))`` with ``rho = pi / pi_old``, and where it was clipped (B, T).

    Schulman et al. 2017, eq. 7; with a higher upper bound as DAPO has it (Yu et al. 2025). Only
    `log_probabilities` has a gradient.
    """
    ratio = (log_probabilities - old_log_probabilities.detach()).exp()
    advantages = advantages.detach()
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), bounded > free


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """``max((V - R)^2, (V_c - R)^2) / 2`` with ``V_c = clip(V, V_old - c, V_old + c)``; None does not clip.

    What clips is in the code of Schulman et al. 2017, and described by Engstrom et al. 2020, section 2.
    """
    returns, old_values = returns.detach(), old_values.detach()
    free = (values - returns).square()
    if clip is None:
        return free / 2
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(free, (bounded - returns).square()) / 2


def pairwise_reward_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """``-log s(r_c - r_r - margin) + centring (r_c + r_r)^2`` for each pair (P,).

    Bradley and Terry 1952; a margin as in Touvron et al. 2023 (Llama 2), eq. 2; rewards are held near 0 as in
    Eisenstein et al. 2023, section 3.
    """
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
    return loss + centring * (chosen + rejected).square() if centring else loss
