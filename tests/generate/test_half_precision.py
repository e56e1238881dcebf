"""Models in 16 bits: their weights stay as they are stored, and their texts are those of exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.adapt.stored_weight import StoredWeight, has_kernels
from sheepop.core.errors import CheckpointError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.native_block import NativeBlock
from sheepop.generate.paged_cache import bytes_per_block
from sheepop.model import Transformer
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no native kernels for this machine")

NETWORKS: dict[str, dict[str, Any]] = {
    "like GPT-2": {"activation": "gelu_tanh", "tie_weights": True},
    "like Gemma": {
        **{"norm": "rmsnorm_zero_centered", "norm_position": "sandwich", "activation": "geglu_tanh", "bias": False},
        **{"position_encoding": "rope", "num_kv_heads": 2, "qk_norm": "head", "attention_soft_cap": 20.0},
        **{"sliding_window": 6, "sliding_layers": [0], "sliding_position_base": 500.0, "logit_soft_cap": 30.0},
    },
    "experts": {"experts": {"count": 4, "per_token": 2}, "activation": "swiglu"},
    "n-grams": {"ngrams": {"orders": [2, 3], "rows": 64}, "position_encoding": "alibi"},
    "convolutions": {"short_convolution": 3, "qk_norm": "own_head"},
    "a delta rule": {
        "gated_delta_net": {"layers": [1], "num_key_heads": 2, "num_value_heads": 4, "key_dim": 4, "value_dim": 8}
    },
    "odd rows": {"d_ff": 72},  # for which there is no kernel
    "latents": {"latent_attention": {"kv_rank": 8, "rope_head_dim": 3}},
}
NATIVE = ("like GPT-2", "like Gemma", "n-grams")
PROMPTS = [list(range(20, 41)), [7, 9, 4], list(range(90, 101)), [5]]


def plain(model: Transformer, prompt: list[int], count: int, stored: torch.dtype) -> list[int]:
    """The likeliest tokens by float64 arithmetic over the whole text for each, with keys and values as stored."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(stored).to(x.dtype)

    text = list(prompt)
    with torch.inference_mode(), watch(model, {"blocks.*.rotated_k": rounded, "blocks.*.attention.v": rounded}):
        for _ in range(count):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def without_end(model: Transformer) -> Transformer:
    """The tokens of a text never end it, and every text has 12 of them."""
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_texts_are_those_of_exact_arithmetic(
    toy_model: Callable[..., Transformer],
    characters: CharTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
