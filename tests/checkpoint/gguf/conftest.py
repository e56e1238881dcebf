"""Toy models: one for every architecture of llama.cpp, and one for every switch that an architecture expresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.gguf.writer import write_gguf
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.model_directory import unique_weights
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, Tokenizer

# More rows than the tokenizer has tokens, as many published models have.
VOCAB = 136
SIZES = {"d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 64, "max_seq_len": 64, "dropout": 0.0}
BIASED = {"norm": "layernorm", "bias": True, "activation": "gelu_tanh"}
GATED = {
    "norm": "rmsnorm", "bias": False, "activation": "swiglu", "position_encoding": "rope", "tie_weights": False,
    "norm_eps": 1e-6,
}  # fmt: skip
GEMMA = GATED | {
    "norm": "rmsnorm_zero_centered", "norm_position": "sandwich", "activation": "geglu_tanh", "tie_weights": True,
    "embedding_scale": 32**0.5, "head_dim": 16, "num_kv_heads": 2,
}  # fmt: skip
YARN = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 32, "high_freq_factor": 3.0}

COHERE = GATED | {
    "norm": "layernorm", "parallel_residual": True, "shared_norm": True, "tie_weights": True, "logit_scale": 0.25,
}  # fmt: skip
GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.25, "logit_scale": 0.125, "attention_scale": 0.3}
STABLELM = GATED | {"norm": "layernorm", "norm_bias": True, "rotary_fraction": 0.5}
WITHOUT_EVERY_FOURTH = tuple(layer for layer in range(64) if layer % 4 < 3)

LFM2 = GATED | {"num_kv_heads": 2, "qk_norm": "head", "gated_convolution": {"layers": (0, 2), "width": 4}}
QWEN = GATED | {
    "num_kv_heads": 2, "head_dim": 16, "qk_norm": "head", "rotary_fraction": 0.5, "attention_output_gate": True,
    "gated_delta_net": {
        # A key is normalised: with few numbers, rounding would change its direction too much.
        "layers": (0, 1), "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32,
    },
}  # fmt: skip
LATENT = GATED | {
    "head_dim": 36, "value_head_dim": 8,
    "latent_attention": {"kv_rank": 32, "q_rank": 32, "rope_head_dim": 4, "norm_eps": 1e-6},
}  # fmt: skip
ROUTED = {"count": 6, "per_token": 2, "d_ff": 32, "shared": 2, "scale": 2.5, "layers": (1, 2)}

GEMMA4 = GATED | {
    "num_layers": 6, "norm_position": "sandwich", "activation": "geglu_tanh", "tie_weights": True, "qk_norm": "head",
    "embedding_scale": 32**0.5, "head_dim": 16, "num_kv_heads": 1, "value_norm": True, "attention_scale": 1.0,
    "position_base": 1e6, "rotary_scaling": {"kind": "proportional", "factor": 1.0, "fraction": 0.25},
    "sliding_window": 6, "sliding_layers": (0, 2, 4), "sliding_head_dim": 8, "sliding_num_kv_heads": 2,
    "sliding_position_base": 700.0, "layer_factor": True, "logit_soft_cap": 9.0,
}  # fmt: skip
# name: (architecture, configuration)
TOYS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", BIASED | {"position_encoding": "learned", "norm_eps": 1e-3}),
    "gpt2-without-biases": ("gpt2", BIASED | {
        "position_encoding": "learned", "bias": False, "tie_weights": False, "num_kv_heads": 2,
    }),
    "sinusoidal": ("gpt2", BIASED | {"position_encoding": "sinusoidal", "activation": "gelu", "position_base": 500.0}),
    "bloom": ("bloom", BIASED | {"position_encoding": "alibi", "embedding_norm": True, "num_heads": 2}),
    "gptneox": ("gptneox", BIASED | {
        "position_encoding": "rope", "rotary_fraction": 0.5, "parallel_residual": True, "tie_weights": False,
        "position_base": 5000.0, "activation": "gelu",
    }),
    "gptneox-one-by-one": ("gptneox", BIASED | {"position_encoding": "rope"}),
    "gemma2": ("gemma2", GEMMA | {
        "attention_soft_cap": 20.0, "logit_soft_cap": 5.0, "sliding_window": 6, "sliding_layers": (0, 2),
    }),
    "gemma3": ("gemma3", GEMMA | {
        "qk_norm": "head", "sliding_window": 6, "sliding_layers": (0, 1), "position_base": 1e6,
        "sliding_position_base": 700.0, "rotary_scaling": {"kind": "linear", "factor": 2.0}, "logit_soft_cap": 9.0,
    }),
    "olmo2": ("olmo2", GATED | {"norm_position": "output", "qk_norm": "width", "num_kv_heads": 2}),
    "olmo2-window": ("olmo2", GATED | {
        "norm_position": "output", "qk_norm": "width", "sliding_window": 5, "sliding_layers": (0, 2),
        "sliding_position_base": 10000.0, "rotary_scaling": YARN, "tie_weights": True,
    }),
    "qwen2": ("qwen2", GATED | {"attention_bias": True, "num_kv_heads": 2, "tie_weights": True}),
    "qwen3": ("qwen3", GATED | {"qk_norm": "head", "head_dim": 16, "num_kv_heads": 2, "position_base": 1e6}),
    "qwen3-yarn": ("qwen3", GATED | {"qk_norm": "head", "rotary_scaling": YARN}),
    "qwen3moe": ("qwen3moe", GATED | {
        "qk_norm": "head", "num_kv_heads": 2, "head_dim": 16, "experts": {"count": 4, "per_token": 2, "d_ff": 32},
    }),
    "llama": ("llama", GATED | {"num_kv_heads": 2}),
    "llama3": ("llama", GATED | {"num_kv_heads": 2, "rotary_scaling": LLAMA3, "tie_weights": True, "head_dim": 16}),
    "llama-biases": ("llama", GATED | {"bias": True, "norm_bias": False, "embedding_scale": 3.0}),
    "llama-linear": ("llama", GATED | {"rotary_scaling": {"kind": "linear", "factor": 2.0}}),
    "llama-ntk": ("llama", GATED | {"rotary_scaling": {"kind": "ntk", "factor": 3.0}}),
    "llama-yarn": ("llama", GATED | {"rotary_scaling": YARN | {"attention_factor": 1.3}}),
    "mixtral": ("llama", GATED | {"num_kv_heads": 2, "experts": {"count": 4, "per_token": 2}}),
    "phi3": ("phi3", GATED | {"rotary_fraction": 0.5, "num_kv_heads": 2}),
    "gemma": ("gemma", GEMMA | {"norm_position": "pre"}),
    "smollm3": ("smollm3", GATED | {"num_kv_heads": 2, "rotary_layers": (0, 1, 2), "num_layers": 4}),
    "glm4": ("glm4", GATED | {
        "norm_position": "sandwich", "rotary_fraction": 0.5, "num_kv_heads": 2, "attention_bias": True,
    }),
    "exaone4": ("exaone4", GATED | {
        "norm_position": "output", "qk_norm": "head", "num_heads": 2, "rotary_scaling": LLAMA3,
    }),
    "exaone4-windows": ("exaone4", GATED | {
        "norm_position": "output", "qk_norm": "head", "num_layers": 64, "d_ff": 32,
        "sliding_window": 6, "sliding_layers": WITHOUT_EVERY_FOURTH, "rotary_layers": WITHOUT_EVERY_FOURTH,
    }),
    "command-r": ("command-r", COHERE | {"num_kv_heads": 2, "attention_bias": True}),
    "cohere2": ("cohere2", COHERE | {
        "num_layers": 4, "sliding_window": 6, "sliding_layers": (0, 1, 2), "rotary_layers": (0, 1, 2),
    }),
    "granite": ("granite", GATED | GRANITE | {"num_kv_heads": 2, "tie_weights": True, "attention_output_bias": True}),
    "granitemoe": ("granitemoe", GATED | GRANITE | {"experts": {"count": 4, "per_token": 2}}),
    "gpt-oss": ("gpt-oss", GATED | {
        "activation": "swiglu_clamped", "attention_sinks": True, "num_kv_heads": 2,
        "head_dim": 16, "attention_bias": True, "attention_output_bias": True, "feed_forward_bias": True,
        "sliding_window": 6, "sliding_layers": (0, 2),
        "experts": {"count": 4, "per_token": 2, "d_ff": 32, "router_bias": True},
    }),
    "gpt-oss-yarn": ("gpt-oss", GATED | {
        "activation": "swiglu_clamped", "attention_sinks": True,
        "feed_forward_bias": True, "sliding_window": 6, "sliding_layers": (0, 2), "tie_weights": True,
        "experts": {"count": 4, "per_token": 2, "router_bias": True}, "rotary_scaling": YARN | {"truncate": False},
    }),
    "starcoder2": ("starcoder2", BIASED | {"position_encoding": "rope", "num_kv_heads": 2}),
    "starcoder2-without-biases": ("starcoder2", BIASED | {
        "position_encoding": "rope", "bias": False, "tie_weights": False, "norm_bias": True,
    }),
    "phi2": ("phi2", BIASED | {
        "position_encoding": "rope", "rotary_fraction": 0.5, "parallel_residual": True, "shared_norm": True,
        "head_bias": True, "tie_weights": False,
    }),
    "stablelm": ("stablelm", STABLELM),
    "stablelm-parallel": ("stablelm", STABLELM | {
        "parallel_residual": True, "shared_norm": True, "attention_bias": True, "tie_weights": True,
    }),
    "arcee": ("arcee", GATED | {
        "activation": "relu_squared", "num_kv_heads": 2, "head_dim": 16, "rotary_scaling": LLAMA3,
    }),
    "mistral3": ("mistral3", GATED | {"num_kv_heads": 2, "head_dim": 16}),
    "ernie4_5": ("ernie4_5", GATED | {"num_kv_heads": 2, "head_dim": 16, "tie_weights": True}),
    "exaone": ("exaone", GATED | {"num_kv_heads": 2, "head_dim": 16, "rotary_scaling": LLAMA3}),
    "lfm2": ("lfm2", LFM2),
    "lfm2moe": ("lfm2moe", LFM2 | {
        "tie_weights": True,
        "experts": {"count": 4, "per_token": 2, "d_ff": 32, "scores": "sigmoid", "layers": (1, 2)},
    }),
    "olmoe": ("olmoe", GATED | {
        "qk_norm": "width", "experts": {"count": 4, "per_token": 2, "normalize": False},
    }),
    "qwen2moe": ("qwen2moe", GATED | {
        "num_kv_heads": 2, "attention_bias": True,
        "experts": {"count": 4, "per_token": 2, "d_ff": 32, "shared": 2, "shared_gate": True, "normalize": False},
    }),
    "glm4moe": ("glm4moe", GATED | {
        "num_kv_heads": 2, "head_dim": 16, "rotary_fraction": 0.5, "attention_bias": True, "qk_norm": "head",
        "experts": ROUTED | {"scores": "sigmoid", "groups": 3, "groups_per_token": 2, "group_top": 2},
    }),
    "glm4moe-plain": ("glm4moe", GATED | {
        "rotary_fraction": 0.5, "tie_weights": True, "experts": ROUTED | {"normalize": False, "layers": None},
    }),
    "qwen3next": ("qwen3next", QWEN | {
        "experts": {"count": 4, "per_token": 2, "d_ff": 32, "shared": 2, "shared_gate": True},
    }),
    "qwen35": ("qwen35", QWEN | {"norm": "rmsnorm_zero_centered"}),
    "qwen35moe": ("qwen35moe", QWEN | {
        "experts": {"count": 4, "per_token": 2, "d_ff": 32, "shared": 1, "shared_gate": True},
    }),
    "deepseek2": ("deepseek2", LATENT | {
        "rotary_scaling": YARN | {"attention_factor": 1.0}, "attention_scale": 0.3,
        "experts": ROUTED | {"scores": "sigmoid", "groups": 3, "groups_per_token": 2, "group_top": 2},
    }),
    "deepseek2-plain": ("deepseek2", LATENT | {"tie_weights": True, "experts": ROUTED | {"normalize": False}}),
    "gemma4": ("gemma4", GEMMA4 | {
        "shared_kv_layers": 2, "layer_d_ff": (64, 64, 64, 64, 96, 96), "layer_inputs": {"width": 32},
    }),
    "gemma4-experts": ("gemma4", GEMMA4 | {
        "keys_as_values": (1, 3, 5), "logit_soft_cap": None,
        "experts": {
            "count": 4, "per_token": 2, "d_ff": 32, "shared": 2, "own_norms": True, "expert_scales": True,
            "router_scale": 32**-0.5,
        },
    }),
    "seed_oss": ("seed_oss", GATED | {"num_kv_heads": 2, "head_dim": 16, "attention_bias": True}),
}  # fmt: skip


@dataclass(frozen=True)
class Toy:
    """A network with random weights of such sizes that every part of it matters."""

    architecture: str
    model: Transformer
    tokenizer: Tokenizer | None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        return {name: LazyTensor.of(tensor) for name, tensor in unique_weights(self.model).items()}

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> Toy:
        return replace(self, tokenizer=tokenizer)

    def write(self, path: Path, **options: Any) -> Path:
        write_gguf(
            path,
            self.config,
            self.tensors,
            self.tokenizer,
            **{"name": "toy", "architecture": self.architecture, **options},
        )
        return path


def make_toy(name: str, seed: int = 0, **changes: Any) -> Toy:
    architecture, settings = TOYS[name]
    config = ModelConfig(**{**SIZES, **settings, "vocab_size": VOCAB, **changes})
    model = build_model(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * (0.3 if "embedding" in parameter_name else 0.2))
    return Toy(architecture, model, CharTokenizer("äö€漢"))


@pytest.fixture(scope="session")
def make() -> Callable[..., Toy]:
    return make_toy


@pytest.fixture(params=TOYS)
def toy(request: pytest.FixtureRequest) -> Toy:
    return make_toy(request.param)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "toy.gguf"
    return make_toy("llama3", d_model=16, num_layers=1, d_ff=16, head_dim=4).write(path, dtype="f16").read_bytes()
