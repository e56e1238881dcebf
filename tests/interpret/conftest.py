"""Small networks whose numbers are far from those of a new one, to be looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sheepop.interpret.trace import Trace
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer

TINY = {"vocab_size": 128, "d_model": 32, "num_layers": 3, "num_heads": 4, "max_seq_len": 32, "dropout": 0.1}
PAIRS = {"architecture": "encoder_decoder", "num_encoder_layers": 2}


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def shaken(model: Transformer, by: float = 0.1) -> Transformer:
    """The network with noise on every weight, so that nothing is 0 or 1 by chance of its beginning."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="session")
def network() -> Callable[..., Transformer]:
    def build(**settings: Any) -> Transformer:
        return shaken(build_model(ModelConfig(**{**TINY, **settings}), seed=1)).double().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def traced(network: Callable[..., Transformer]) -> Callable[..., Trace]:
    """``traced("text", key=value)``: a trace in float64 of a network of these settings."""

    def trace(text: str = "ABCDABXY", **settings: Any) -> Trace:
        return Trace.of(network(**settings), CharTokenizer(), text)

    return trace
