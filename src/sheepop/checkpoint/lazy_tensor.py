"""Tensors that are read on demand, so that a model larger than memory can be converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        """Wraps a tensor that is already in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def load(self) -> Tensor:
        """Reads the values into memory that belongs to the tensor alone, not to a memory map."""
        return self.read().clone()

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the data in bytes."""
        return self.dtype.itemsize * self.count


def total_bytes(tensors: Mapping[str, LazyTensor]) -> int:
    """Returns the total size of the tensors in bytes."""
    return sum(tensor.num_bytes for tensor in tensors.values())


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, converted to our terms.

    `tensors` have the names and shapes of `sheepop.checkpoint.expected_tensors`. `generation` has the keys of
    ``generation_config.json``: `eos_token_id` (a number or a list) ends a text, in addition to the tokenizer's own.
    `source` describes the origin of the model, and `notes` tell the user what was left out or differs. `quantized` has
    the parts of quantised matrices, which are stored without loss: the integers by the name of the matrix, and scales
    and offsets by that name with a suffix.
    """

    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: Tokenizer
    generation: Mapping[str, Any]
    source: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    quantized: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)

    def stored(self) -> dict[str, LazyTensor]:
        """Returns all tensors, quantised matrices as their parts."""
        return {
            name: part
            for whole, tensor in self.tensors.items()
            for name, part in self.quantized.get(whole, {whole: tensor}).items()
        }
