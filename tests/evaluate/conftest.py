"""Networks and texts of evaluations: real ones, small enough for a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheepop.generate import Generator
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer

TINY = {"vocab_size": 128, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64, "tie_weights": False}


@pytest.fixture(scope="session")
def shaken() -> Callable[..., Transformer]:
    """Builds a network with weights large enough that what it predicts is far from even."""

    def build(seed: int = 4, **changes: Any) -> Transformer:
        model = build_model(ModelConfig(**{**TINY, **changes}), seed).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.3, generator=generator)
        return model

    return build


@pytest.fixture(scope="session")
def generator(shaken: Callable[..., Transformer]) -> Generator:
    return Generator(shaken(max_seq_len=256), CharTokenizer())
