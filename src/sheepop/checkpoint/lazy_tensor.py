"""A tensor that is read when it is asked for, so that a model larger than memory can pass through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sheepop.model import ModelConfig
from sheepop.tokenizer import Tokenizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LazyTensor:
    """Shape and dtype, known without reading, and a function that reads the values onto the CPU."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of its numbers in a file."""
        return self.dtype.itemsize * self.count


def total_bytes(tensors: Mapping[str, LazyTensor]) -> int:
    """The size of all tensors together."""
    return sum(tensor.num_bytes for tensor in tensors.values())


@dataclass(frozen=True)
class ForeignModel:
    """What a reader of another program's format found, in our terms.

    `tensors` have the names and shapes of `sheepop.checkpoint.expected_tensors`. `generation` holds the keys of
    ``generation_config.json``: `eos_token_id` (a number or a list) ends a text beside the tokenizer's own. `source`
    says where the model came from, and `notes` are sentences for the user about what was left out or differs.
    """

    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer
    generation: Mapping[str, Any]
    source: Mapping[str, Any]
    notes: tuple[str, ...] = ()
