"""The output projection: from hidden states to logits, a loss or scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sheepop.model.logits import LossMemory, Places, cap
from sheepop.model.loss import (
    LossSums,
    LossTerms,
    PartOfVocabulary,
    Projection,
    linear_cross_entropy,
    linear_log_probabilities,
    score_tokens,
)


class OutputHead(nn.Linear):
    """Maps hidden states (..., D) to logits (..., V), or to losses without holding all logits at once.

    A `soft_cap` c turns logits z into ``c tanh(z / c)``. `cast` is a copy of the weight in the data type of training
    steps, if that differs from the weight's; the gradient still goes to `weight`. With a `vocabulary`, losses use a
    weight that holds only some of its rows. To the losses, a bias is the weight of one more hidden column, which is 1.
    """

    vocabulary: PartOfVocabulary | None = None

    def __init__(self, d_model: int, vocab_size: int, soft_cap: float | None = None, *, bias: bool = False) -> None:
        super().__init__(d_model, vocab_size, bias=bias)
        self.soft_cap = soft_cap
        self.cast: Tensor | None = None
        self._memory: LossMemory | None = None
        self._gradient: Tensor | None = None

    @property
    def own_weight(self) -> Tensor:
        """The weight that losses use."""
        return self.weight

    @property
    def own_bias(self) -> Tensor | None:
        """The bias that losses use."""
        return self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the hidden states."""
        return cap(super().forward(hidden), self.soft_cap)

    def keep_memory(self) -> None:
        """Makes later calls reuse the memory of large tensors, so a gradient stays valid only until `begin_step`."""
        self._memory = LossMemory()

    def begin_step(self) -> None:
        """Must be called before the first loss of a step. Frees the gradient's memory for reuse if `grad` is None."""
        if self._memory is not None and self.weight.requires_grad and self.weight.grad is None:
            if self._gradient is None:
                self._gradient = torch.empty_like(self.weight, requires_grad=False)
            self._memory.gradient = self._gradient

    def cross_entropy(
        self, hidden: Tensor, labels: Tensor, terms: LossTerms | None = None, places: Places | None = None
    ) -> LossSums:
        """Returns the loss of hidden states (B, T, D) for labels (B, T); see `loss.linear_cross_entropy`."""
        hidden, weight, projection = self._inputs(hidden, places)
        return linear_cross_entropy(hidden, weight, labels, terms, **projection)

    def log_probabilities(self, hidden: Tensor, labels: Tensor, places: Places | None = None) -> Tensor:
        """``log p(label)`` (B, T), 0 where the label is -100; see `loss.linear_log_probabilities`."""
        hidden, weight, projection = self._inputs(hidden, places)
        return linear_log_probabilities(hidden, weight, labels, **projection)

    def score(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy and the number of correct predictions; see `loss.score_tokens`."""
        return score_tokens(*_joined(hidden, self.weight, self.bias), labels, soft_cap=self.soft_cap)

    def _inputs(self, hidden: Tensor, places: Places | None) -> tuple[Tensor, Tensor, Projection]:
        bias, cast = self.own_bias, self.cast
        if cast is not None and bias is not None:
            cast = torch.cat([cast, bias.detach()[:, None].to(cast.dtype)], dim=1)
        parts: Projection = {"weight_cast": cast, "soft_cap": self.soft_cap, "memory": self._memory}
        parts["vocabulary"] = self.vocabulary
        hidden, weight = _joined(hidden, self.own_weight, bias)
        return hidden, weight, parts if places is None else {**parts, "places": places}


def _joined(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns hidden states (..., D + 1) and a weight (V, D + 1) whose products include the bias, if there is one."""
    if bias is None:
        return hidden, weight
    ones = hidden.new_ones(*hidden.shape[:-1], 1)
    return torch.cat([hidden, ones], dim=-1), torch.cat([weight, bias[:, None].to(weight.dtype)], dim=1)
