"""Networks with weights that make them write varied or exactly predictable text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, Tokenizer

TINY = {
    "vocab_size": 128,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 64,
    "dropout": 0.1,
    "tie_weights": False,
}

# Heads of two widths, two layers with the keys of others, and vectors of layers.
SHARED: dict[str, Any] = {
    "num_layers": 5, "head_dim": 8, "num_kv_heads": 1, "sliding_window": 5, "sliding_layers": [0, 2, 3],
    "sliding_head_dim": 4, "sliding_num_kv_heads": 2, "shared_kv_layers": 2, "keys_as_values": [1], "value_norm": True,
    "layer_inputs": {"width": 16}, "layer_factor": True,
}  # fmt: skip


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: for tensors this small, more threads are slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def characters() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture(scope="session")
def toy_model() -> Callable[..., Transformer]:
    """Builds a tiny network with weights large enough that its distribution is far from uniform."""

    def build(seed: int = 4, **changes: Any) -> Transformer:
        model = build_model(ModelConfig(**{**TINY, **changes}), seed).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.3, generator=generator)
                else:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    return build


@pytest.fixture(scope="session")
def chain_model() -> Callable[..., Transformer]:
    """Builds a network that writes the cycle `ids`: after each of them the next one has the logit `score`, others 0.

    Every residual branch ends in zeros and the embedding is the identity, so the final norm of token i is
    sqrt(V) times unit vector i, and column i of the head holds the logits.
    """

    def build(tokenizer: Tokenizer, ids: Sequence[int], *, score: float = 20.0, max_seq_len: int = 64) -> Transformer:
        vocab_size = tokenizer.vocab_size
        config = ModelConfig(
            vocab_size=vocab_size,
            d_model=vocab_size,
            head_dim=8,
            num_heads=1,
            num_layers=1,
            d_ff=8,
            max_seq_len=max_seq_len,
            position_encoding="rope",
            norm="rmsnorm",
            norm_eps=1e-12,
            bias=False,
            tie_weights=False,
        )
        model = build_model(config, 0).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                    parameter.zero_()
            model.embedding.weight.copy_(torch.eye(vocab_size))
            for token_id, successor in zip(ids, [*ids[1:], ids[0]], strict=True):
                model.lm_head.weight[successor, token_id] = score / vocab_size**0.5
        return model

    return build
