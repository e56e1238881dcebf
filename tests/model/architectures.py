"""Configurations that together make every choice of the network, for what has to hold for all of them."""

from __future__ import annotations

from typing import Any

from sheepop.model import ModelConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16, "dropout": 0.0
}  # fmt: skip
_LLAMA: dict[str, Any] = {"position_encoding": "rope", "activation": "swiglu", "norm": "rmsnorm", "bias": False}

ARCHITECTURES: dict[str, ModelConfig] = {
    name: ModelConfig(**{**_SIZES, **choices})
    for name, choices in {
        "sheepop": {},
        "llama": {**_LLAMA, "num_layers": 3, "num_kv_heads": 2, "head_dim": 12, "tie_weights": False},
        "gpt2": {"position_encoding": "learned", "activation": "gelu_tanh", "d_model": 48, "num_heads": 3},
        "gemma": {
            **_LLAMA, "activation": "geglu_tanh", "norm": "rmsnorm_zero_centered", "norm_position": "sandwich",
            "qk_norm": "head", "sliding_window": 5, "sliding_layers": (0,), "attention_soft_cap": 5.0,
            "logit_soft_cap": 3.0, "sliding_position_base": 100.0, "embedding_scale": 5.0,
        },
        "olmo": {**_LLAMA, "norm_position": "output", "qk_norm": "width", "num_kv_heads": 1},
        "bloom": {"position_encoding": "alibi", "embedding_norm": True, "num_heads": 3, "head_dim": 8},
        "neox": {"position_encoding": "rope", "rotary_fraction": 0.5, "parallel_residual": True, "activation": "relu"},
        "phi": {
            **_LLAMA, "num_layers": 3, "parallel_residual": True, "shared_norm": True, "rotary_layers": (0, 2),
            "residual_scale": 0.5, "logit_scale": 0.25, "head_bias": True, "sliding_window": 4,
            "sliding_layers": (1, 2),
        },
        "post": {"norm_position": "post", "position_encoding": "none", "activation": "relu_squared"},
        "mistral": {**_LLAMA, "sliding_window": 3, "num_kv_heads": 2},
        "sinks": {"attention_sinks": True, "sliding_window": 6, "sliding_layers": (1,)},
        "wide values": {"value_head_dim": 20, "attention_backend": "eager", "bias": False},
        "mixtral": {**_LLAMA, "experts": {"count": 4, "per_token": 2}},
        "deepseek": {
            **_LLAMA, "num_layers": 3,
            "experts": {"count": 6, "per_token": 3, "d_ff": 16, "shared": 2, "scores": "sigmoid", "layers": (1, 2)},
        },
        "latent": {
            **_LLAMA, "head_dim": 12, "value_head_dim": 8, "attention_bias": True,
            "latent_attention": {"kv_rank": 16, "q_rank": 24, "rope_head_dim": 4},
            "experts": {
                "count": 6, "d_ff": 16, "scores": "sigmoid", "layers": (1,), "groups": 3, "groups_per_token": 2,
                "group_top": 2, "scale": 2.5,
            },
        },
        "gpt-oss": {
            **_LLAMA, "attention_sinks": True, "sliding_window": 5, "sliding_layers": (0,), "feed_forward_bias": True,
            "activation": "swiglu_clamped", "experts": {"count": 4, "router_bias": True}, "tie_weights": False,
            "head_bias": True,
        },
        "switch": {"experts": {"count": 4, "per_token": 1, "layers": (1,)}, "tie_weights": False},
        "convolved": {**_LLAMA, "short_convolution": 3, "num_kv_heads": 2, "value_head_dim": 12, "qk_norm": "head"},
        "ngrams": {**_LLAMA, "ngrams": {"orders": (2, 4), "rows": 64}, "short_convolution": 2, "tie_weights": False},
        "gated convolutions": {
            **_LLAMA, "num_layers": 3, "gated_convolution": {"layers": (0, 2), "bias": True}, "qk_norm": "head",
            "sliding_window": 5,
        },
        "delta nets": {
            **_LLAMA, "num_layers": 4, "attention_output_gate": True, "norm": "rmsnorm_zero_centered",
            "gated_delta_net": {
                "layers": (0, 1, 3), "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5,
            },
            "experts": {"count": 4, "shared": 2, "d_ff": 16, "shared_gate": True, "layers": (1, 2)},
            "tie_weights": False, "rotary_fraction": 0.5,
        },
        "gemma 4": {
            **_LLAMA, "activation": "geglu_tanh", "norm_position": "sandwich", "qk_norm": "head", "value_norm": True,
            "num_layers": 5, "head_dim": 12, "num_kv_heads": 1, "sliding_window": 4, "sliding_layers": (0, 2, 3),
            "sliding_head_dim": 8, "sliding_num_kv_heads": 2, "sliding_position_base": 50.0, "layer_factor": True,
            "rotary_scaling": {"kind": "proportional", "factor": 1.0, "fraction": 0.5}, "attention_scale": 0.5,
            "keys_as_values": (1,), "shared_kv_layers": 2, "layer_d_ff": (24, 24, 24, 48, 48),
            "layer_inputs": {"width": 6},
            "experts": {
                "count": 4, "shared": 3, "d_ff": 8, "own_norms": True, "expert_scales": True, "router_scale": 0.2,
                "layers": (1, 4),
            },
        },
        "mup": {"initialization": "mup", "mup_base_d_model": 16},
        "dropout": {"dropout": 0.1},
        "pairs": {"architecture": "encoder_decoder", "num_encoder_layers": 1, "norm_position": "post"},
        "rotated pairs": {
            **_LLAMA, "architecture": "encoder_decoder", "num_encoder_layers": 3, "num_kv_heads": 2,
            "value_head_dim": 12,
        },
    }.items()
}  # fmt: skip
