"""Group relative policy optimisation and its relatives: an answer is judged beside others to the same prompt.

GRPO is of Shao et al. 2024, RLOO of Ahmadian et al. 2024, Dr. GRPO of Liu et al. 2025, DAPO of Yu et al. 2025. They
differ in the baseline, in what a step is a mean of, and in which answers are left out; `GRPOConfig` has a switch for
each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sheepop.posttrain.advantages import group_advantages, leave_one_out_advantages
from sheepop.posttrain.config import GRPOConfig
from sheepop.posttrain.policy import ADVANTAGES, WEIGHTS
from sheepop.posttrain.rollouts import RewardMethod
from sheepop.posttrain.written import Written


class GroupPolicy(RewardMethod):
    """GRPO's reading of a rollout."""

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
