"""Small networks in float64, and full Jacobians of toy size to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

from ..conftest import shaken

SMALL = {"vocab_size": 128, "d_model": 8, "num_layers": 3, "num_heads": 2, "max_seq_len": 16, "dropout": 0.0}


def point_of(model: Transformer, prompt: str | Sequence[int]) -> OperatingPoint:
    return OperatingPoint.of(model, CharTokenizer(), prompt, torch.float64)


def matrix(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The full Jacobian of a function at a point, by torch.func."""
    found = torch.func.jacrev(function)(x)
    return found.reshape(-1, x.numel())


def last_stream(model: Transformer, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The map from the stream before the first block to that after the last, in an ordinary pass over token ids."""

    def function(x_TD: Tensor) -> Tensor:
        found: list[Tensor] = []
        last = f"blocks.{model.config.num_layers - 1}.output"
        observers = {"positioned": lambda _: x_TD[None], last: found.append, "*attention.weights": lambda _: None}
        with watch(model, observers):
            model.hidden_states(torch.tensor([ids]))
        return found[0][0]

    return function


@pytest.fixture(scope="session")
def point() -> OperatingPoint:
    """Three blocks of width 8 at the prompt "sheep"."""
    return point_of(shaken(build_model(ModelConfig(**SMALL), seed=2), 0.2).double(), "sheep")
