"""A tiny model in every folder of this package's tests."""

from __future__ import annotations

import pytest

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, Tokenizer

from ..hub_server import client, fault, hub

__all__ = ["client", "fault", "hub"]


@pytest.fixture
def model() -> Transformer:
    config = ModelConfig(
        vocab_size=131, d_model=16, num_layers=2, num_heads=2, max_seq_len=32, position_encoding="rope", dropout=0.0
    )
    return build_model(config, seed=3)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return CharTokenizer("äöü")
