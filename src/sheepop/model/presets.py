"""Named model sizes. Each row is plain configuration; keys set by the user override it."""

from __future__ import annotations

from typing import Any

# The architecture of the SheepOp documents: pre-norm, sinusoidal positions, GELU, LayerNorm, tied embeddings.
_SHEEPOP: dict[str, Any] = {
    "position_encoding": "sinusoidal",
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "dropout": 0.1,
    "tie_weights": True,
}

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
_GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "max_seq_len": 1024,
    "position_encoding": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
    "dropout": 0.1,
    "tie_weights": True,
}

# Touvron et al. 2023, "LLaMA", section 2.2, at sizes that train on one machine.
_LLAMA: dict[str, Any] = {
    "position_encoding": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.0,
    "tie_weights": True,
}

# Vaswani et al. 2017, "Attention Is All You Need", section 3 and table 3: the base and the big model.
_VASWANI: dict[str, Any] = {
    "architecture": "encoder_decoder",
    "max_seq_len": 512,
    "position_encoding": "sinusoidal",
    "norm": "layernorm",
    "norm_position": "post",
    "activation": "relu",
    "bias": True,
    "initialization": "xavier_uniform",
    "tie_weights": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "sheepop-tiny": {**_SHEEPOP, "d_model": 128, "num_layers": 4, "num_heads": 4, "max_seq_len": 256},
    "sheepop-small": {**_SHEEPOP, "d_model": 256, "num_layers": 6, "num_heads": 8, "max_seq_len": 512},
    "sheepop-base": {**_SHEEPOP, "d_model": 512, "num_layers": 6, "num_heads": 8, "max_seq_len": 1024},
    "gpt2": {**_GPT2, "d_model": 768, "num_layers": 12, "num_heads": 12},
    "gpt2-medium": {**_GPT2, "d_model": 1024, "num_layers": 24, "num_heads": 16},
    "gpt2-large": {**_GPT2, "d_model": 1280, "num_layers": 36, "num_heads": 20},
    "gpt2-xl": {**_GPT2, "d_model": 1600, "num_layers": 48, "num_heads": 25},
    "transformer-base": {**_VASWANI, "d_model": 512, "num_layers": 6, "num_heads": 8, "dropout": 0.1},
    "transformer-big": {**_VASWANI, "d_model": 1024, "num_layers": 6, "num_heads": 16, "dropout": 0.3},
    "llama-1m": {**_LLAMA, "d_model": 128, "num_layers": 4, "num_heads": 4, "max_seq_len": 256},
    "llama-4m": {**_LLAMA, "d_model": 256, "num_layers": 4, "num_heads": 4, "max_seq_len": 256},
    "llama-15m": {**_LLAMA, "d_model": 288, "num_layers": 6, "num_heads": 6, "max_seq_len": 256},
    "llama-42m": {**_LLAMA, "d_model": 512, "num_layers": 8, "num_heads": 8, "max_seq_len": 1024},
    "llama-110m": {**_LLAMA, "d_model": 768, "num_layers": 12, "num_heads": 12, "max_seq_len": 1024},
}
