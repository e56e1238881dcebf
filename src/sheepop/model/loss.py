"""The training objective: cross-entropy of the next token, summed over supervised positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """``-sum log softmax(logits)[label]`` over labels that are not -100, in float32.

    `logits` (..., V) and `labels` (...) are already aligned: a label is the token after its position. The sum,
    not the mean, is returned so that a step made of several micro-batches can divide by all of its tokens.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of `cross_entropy_sum` over supervised positions (0 when there are none)."""
    return cross_entropy_sum(logits, labels) / (labels != IGNORE_INDEX).sum().clamp(min=1)
