"""The output projection: hidden states go in, and logits, a loss or scores come out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sheepop.model.logits import LossMemory, Places, cap
from sheepop.model.loss import (
    LossSums,
    LossTerms,
    PartOfVocabulary,
    linear_cross_entropy,
    linear_log_probabilities,
    score_tokens,
)


class OutputHead(nn.Linear):
    """Hidden states (..., D) to logits (..., V), and to what is made of logits without holding all of them.

    Logits z are bounded to ``c tanh(z / c)`` with a `soft_cap` c. `cast` is a copy of the weight in the data type that
    training steps multiply in, if that is not the weight's own; the gradient arrives in `weight` all the same. With a
    `vocabulary` the weight that losses are computed with is a part of it.
    """

    vocabulary: PartOfVocabulary | None = None

    def __init__(self, d_model: int, vocab_size: int, soft_cap: float | None = None) -> None:
        super().__init__(d_model, vocab_size, bias=False)
        self.soft_cap = soft_cap
        self.cast: Tensor | None = None
        self._memory: LossMemory | None = None
        self._gradient: Tensor | None = None

    @property
    def own_weight(self) -> Tensor:
        """The weight that losses are computed with."""
        return self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states."""
        return cap(super().forward(hidden), self.soft_cap)

    def keep_memory(self) -> None:
        """From now on calls share the memory of what is large in them, so a gradient holds until `begin_step`."""
        self._memory = LossMemory()

    def begin_step(self) -> None:
        """Called before the first loss of a step: the memory of the last gradient is free if that is gone."""
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
            self.own_weight,
            labels,
            terms,
            places=places,
            weight_cast=self.cast,
            soft_cap=self.soft_cap,
            memory=self._memory,
            vocabulary=self.vocabulary,
        )

    def log_probabilities(self, hidden: Tensor, labels: Tensor, places: Places | None = None) -> Tensor:
        """``log p(label)`` (B, T), 0 where the label is -100; see `sheepop.model.linear_log_probabilities`."""
        return linear_log_probabilities(
            hidden,
            self.own_weight,
            labels,
            places=places,
            weight_cast=self.cast,
            soft_cap=self.soft_cap,
            memory=self._memory,
            vocabulary=self.vocabulary,
        )

    def score(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy and number of right guesses; see `sheepop.model.score_tokens`."""
        return score_tokens(hidden, self.weight, labels, soft_cap=self.soft_cap)
