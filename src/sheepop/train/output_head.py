"""The output projection as a training step uses it: hidden states go in, the loss comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from sheepop.model import LossSums, LossTerms, Transformer, linear_cross_entropy
from sheepop.model.logits import LossMemory, Places


class OutputHead:
    """The loss under the output projection of `model`, whose gradient arrives in `weight`.

    `cast` is a copy of the weight in `dtype`, the data type of the working copy, if there is one.

    On a CPU all steps share the memory of what is large in them. So a gradient of the weight holds until the next step
    begins without one.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype | None, device: str) -> None:
        self.weight = model.lm_head.weight  # (V, D)
        self.cast = None if dtype is None else torch.empty_like(self.weight, dtype=dtype, requires_grad=False)
        self._soft_cap = model.config.logit_soft_cap
        # The allocator of an accelerator keeps its memory by itself.
        self._memory = LossMemory() if device == "cpu" else None
        self._gradient: Tensor | None = None

    def begin_step(self) -> None:
        """Called before the first micro-batch of a step: the memory of the last gradient is free if that is gone."""
        if self._memory is not None and self.weight.requires_grad and self.weight.grad is None:
            if self._gradient is None:
                self._gradient = torch.empty_like(self.weight, requires_grad=False)
            self._memory.gradient = self._gradient

    def cross_entropy(
        self, hidden: Tensor, labels: Tensor, terms: LossTerms | None = None, places: Places | None = None
    ) -> LossSums:
        """The loss of hidden states (B, T, D) for labels (B, T); see `sheepop.model.linear_cross_entropy`."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            terms,
            places=places,
            weight_cast=self.cast,
            soft_cap=self._soft_cap,
            memory=self._memory,
        )
