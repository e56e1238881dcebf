"""A tiny Llama in the format of Hugging Face, written by hand so that each test can spoil one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sheepop.tokenizer import CharTokenizer

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 130,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
}


def llama_tensors() -> dict[str, Tensor]:
    """The tensors that a Llama of these sizes has, as the published models name them."""
    shapes = {"model.embed_tokens.weight": (130, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
        shapes |= {f"{place}.mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
        shapes |= {f"{place}.mlp.down_proj.weight": (8, 12)}
        shapes |= {f"{place}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make(keys, tensors)`` writes a directory; keys with the value ... are taken away."""

    def write(keys: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None, name: str = "hf") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        config = {key: value for key, value in {**CONFIG, **(keys or {})}.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(config))
        save_file(llama_tensors() if tensors is None else tensors, directory / "model.safetensors")
        CharTokenizer().save(directory)
        return directory

    return write
