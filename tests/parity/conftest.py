"""Toy models of the transformers library, one for every family with its switches away from their defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from sheepop.checkpoint import LoadedModel, load_model
from sheepop.jobs.exchange import import_model
from sheepop.tokenizer import CharTokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# More rows than the tokenizer has tokens, as many published models have.
VOCAB = 133
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 3.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 2000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 2.0, "beta_slow": 0.3, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False,
}  # fmt: skip
LATENT = LLAMA | {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}  # fmt: skip
ROUTED = {"n_routed_experts": 6, "moe_intermediate_size": 16}

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
GEMMA4 = LLAMA | {
    "head_dim": 8, "global_head_dim": 12, "sliding_window": 4, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip

# name: (class of the model, class of its configuration, keys)
TOYS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-3,
    }),
    "gpt2-other": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": 40,
        "activation_function": "relu", "scale_attn_weights": False, "tie_word_embeddings": False,
    }),
    "llama3": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "rope_parameters": LLAMA3, "head_dim": 12, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    }),
    "llama2": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0}, "rms_norm_eps": 1e-2,
        "num_key_value_heads": 4,
    }),
    "smollm": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {
        "rope_parameters": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_act": "gelu",
    }),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {
        "sliding_window": 5, "head_dim": 12, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
        "rope_parameters": YARN,
    }),
    "mistral-0.3": ("MistralForCausalLM", "MistralConfig", LLAMA | {
        "sliding_window": None, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
    }),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | {
        "sliding_window": 6, "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True, "router_aux_loss_coef": 0.02, "hidden_act": "gelu", "rope_parameters": LLAMA3,
    }),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA | {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 800.0, "factor": 3.0, "original_max_position_embeddings": 16,
            "beta_fast": 2.0, "beta_slow": 0.3, "attention_factor": 1.2,
        },
        "rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh",
    }),
    "qwen2-untied": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA | {
        "head_dim": 12, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 400.0},
    }),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {
        "head_dim": 10, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4,
        "layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    }),
    "qwen3-tied": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {
        "head_dim": 10, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu",
        "rope_parameters": YARN,
    }),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", LLAMA | {
        "head_dim": 10, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "attention_bias": True,
        "decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 5, "mlp_only_layers": [3],
        "use_sliding_window": True, "sliding_window": 6, "rms_norm_eps": 1e-3, "router_aux_loss_coef": 0.02,
        "rope_parameters": YARN,
    }),
    "qwen3-moe-all": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_act": "gelu",
    }),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA | {
        "head_dim": 10, "query_pre_attn_scalar": 24, "sliding_window": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "attention_bias": True, "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 600.0},
    }),
    "gemma2-plain": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA | {
        "head_dim": 10, "sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": [FULL, SLIDING, FULL], "tie_word_embeddings": False, "hidden_activation": "silu",
    }),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | {
        "head_dim": 10, "query_pre_attn_scalar": 17, "sliding_window": 4, "layer_types": [SLIDING, SLIDING, FULL],
        "final_logit_softcapping": 2.5, "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            FULL: {"rope_type": "linear", "rope_theta": 4000.0, "factor": 4.0},
        },
    }),
    "gemma3-other": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | {
        "head_dim": 10, "sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING], "tie_word_embeddings": False,
        "attention_bias": True, "rms_norm_eps": 1e-3, "hidden_activation": "silu",
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 70.0}, FULL: YARN | {"truncate": True}},
    }),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "attention_bias": True,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6,
        "final_logit_softcapping": 2.5, "rms_norm_eps": 1e-3, "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            FULL: {"rope_type": "proportional", "rope_theta": 4000.0, "partial_rotary_factor": 0.5},
        },
    }),
    "gemma4-moe": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 4, "moe_intermediate_size": 8,
        "tie_word_embeddings": False, "hidden_activation": "silu",
    }),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA | {
        "sliding_window": 6, "pad_token_id": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.5},
    }),
    "phi3-untied": ("Phi3ForCausalLM", "Phi3Config", LLAMA | {"head_dim": 12, "pad_token_id": None}),
    "phi3-128k": ("Phi3ForCausalLM", "Phi3Config", LLAMA | {
        "pad_token_id": None, "original_max_position_embeddings": 48, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.3, 2.1, 3.7],
            "long_factor": [1.5, 2.0, 4.0, 9.0], "original_max_position_embeddings": 48,
        },
    }),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", LLAMA | {
        "attention_bias": True, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "head_dim": 12, "hidden_act": "gelu",
    }),
    "pythia": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5},
    }),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "use_parallel_residual": False,
        "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_fast",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0, "partial_rotary_factor": 0.25},
    }),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCAB, "hidden_size": 36, "n_layer": 3, "n_head": 6, "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    }),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA | {
        "rope_parameters": YARN, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
        "head_dim": 12, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu",
        "tie_word_embeddings": False,
    }),
    "smollm3-full": ("SmolLM3ForCausalLM", "SmolLM3Config", LLAMA | {
        "no_rope_layer_interval": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    }),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", LLAMA | {
        "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5, "logit_scale": 0.5, "layer_norm_eps": 1e-3,
        "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu", "rope_parameters": LLAMA3,
    }),
    "cohere": ("CohereForCausalLM", "CohereConfig", LLAMA | {
        "logit_scale": 0.25, "layer_norm_eps": 1e-3, "attention_bias": True, "hidden_act": "gelu",
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        "head_dim": 12,
    }),
    "command-r-plus": ("CohereForCausalLM", "CohereConfig", LLAMA | {"use_qk_norm": True, "layer_norm_eps": 1e-3}),
    "aya": ("CohereForCausalLM", "CohereConfig", LLAMA | {"num_key_value_heads": 4}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", LLAMA | {
        "sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING], "rms_norm_eps": 1e-3, "hidden_act": "gelu",
        "tie_word_embeddings": True, "head_dim": 12, "rope_parameters": LLAMA3,
    }),
    "exaone4-full": ("Exaone4ForCausalLM", "Exaone4Config", LLAMA | {
        "sliding_window": None, "layer_types": [FULL, FULL, FULL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
    }),
    "granite": ("GraniteForCausalLM", "GraniteConfig", LLAMA | {
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "mlp_bias": True, "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "hidden_act": "gelu", "head_dim": 12, "rope_parameters": LLAMA3,
    }),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LLAMA | {
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": True, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True, "hidden_act": "gelu", "router_aux_loss_coef": 0.02, "rope_parameters": LLAMA3,
        "head_dim": 12,
    }),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", LLAMA | {
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True,
        "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "gelu", "router_aux_loss_coef": 0.02,
        "rope_parameters": YARN,
    }),
    "olmoe-plain": ("OlmoeForCausalLM", "OlmoeConfig", LLAMA | {
        "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
    }),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", LLAMA | {
        "sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING], "attention_bias": True, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True, "head_dim": 12, "hidden_act": "gelu", "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 500_000.0},
            FULL: YARN | {"truncate": True, "rope_theta": 500_000.0},
        },
    }),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", LLAMA | {
        "head_dim": 12, "attention_bias": False, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    "glm4-bias": ("Glm4ForCausalLM", "Glm4Config", LLAMA | {"head_dim": 8, "num_key_value_heads": 1}),
    "seed-oss": ("SeedOssForCausalLM", "SeedOssConfig", LLAMA | {
        "head_dim": 12, "attention_out_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu",
        "tie_word_embeddings": True, "attention_bias": False, "rope_parameters": LLAMA3, "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    }),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", LLAMA | {
        "head_dim": 12, "mlp_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": YARN,
    }),
    "arcee-gelu": ("ArceeForCausalLM", "ArceeConfig", LLAMA | {"hidden_act": "gelu"}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", LLAMA | {
        "use_qkv_bias": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3, "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    }),
    "stablelm-norms": ("StableLmForCausalLM", "StableLmConfig", LLAMA | {
        "qk_layernorm": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3,
    }),
    "stablelm-serial": ("StableLmForCausalLM", "StableLmConfig", LLAMA),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", LLAMA | {
        "use_bias": False, "sliding_window": 5, "norm_epsilon": 1e-3, "tie_word_embeddings": False, "head_dim": 12,
        "hidden_act": "relu", "initializer_range": 0.03, "rope_parameters": LLAMA3,
    }),
    "starcoder2-bias": ("Starcoder2ForCausalLM", "Starcoder2Config", LLAMA | {"num_key_value_heads": 1}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", LLAMA | {
        "head_dim": 10, "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
        "hidden_act": "silu", "rope_parameters": YARN,
    }),
    "gemma-gelu": ("GemmaForCausalLM", "GemmaConfig", LLAMA | {"head_dim": 8, "hidden_act": "gelu"}),
    "ernie": ("Ernie4_5ForCausalLM", "Ernie4_5Config", LLAMA | {
        "head_dim": 12, "use_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "hidden_act": "gelu",
        "rope_parameters": LLAMA3,
    }),
    "ernie-tied": ("Ernie4_5ForCausalLM", "Ernie4_5Config", LLAMA | {"head_dim": 8, "num_key_value_heads": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "dropout": 0.0, "init_std": 0.01,
    }),
    "opt-other": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCAB, "hidden_size": 36, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
        "max_position_embeddings": 64, "dropout": 0.0, "enable_bias": False, "tie_word_embeddings": False,
        "activation_function": "gelu",
    }),
    "phi": ("PhiForCausalLM", "PhiConfig", LLAMA | {
        "layer_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "relu", "head_dim": 12,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 90.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    }),
    "phi-norms": ("PhiForCausalLM", "PhiConfig", LLAMA | {"qk_layernorm": True, "layer_norm_eps": 1e-3}),
    "phi-untied": ("PhiForCausalLM", "PhiConfig", LLAMA),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64, "rotary_dim": 6,
        "layer_norm_epsilon": 1e-3, "n_inner": 40, "activation_function": "relu",
    }),
    "gptj-tied": ("GPTJForCausalLM", "GPTJConfig", {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8,
        "tie_word_embeddings": True,
    }),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", LLAMA | {
        "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "rms_norm_eps": 1e-3,
        "layer_types": [FULL, SLIDING, SLIDING], "tie_word_embeddings": True, "attention_bias": False,
        "router_aux_loss_coef": 0.02, "rope_parameters": YARN,
    }),
    "gpt-oss-default": ("GptOssForCausalLM", "GptOssConfig", LLAMA | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3,
    }),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT | ROUTED | {
        "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "gelu",
        "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.7}, "first_k_dense_replace": 1, "n_group": 3,
        "topk_group": 2, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3, "n_shared_experts": 1,
        "routed_scaling_factor": 3.0,
    }),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT | ROUTED | {
        "q_lora_rank": None, "num_experts_per_tok": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
    }),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | ROUTED | {
        "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "gelu",
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "first_k_dense_replace": 1, "n_group": 3,
        "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": False,
    }),
    "kimi-k2": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | ROUTED | {
        "rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "routed_scaling_factor": 2.8, "q_lora_rank": None,
    }),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT | ROUTED | {
        "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "gelu",
        "rope_parameters": YARN, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "norm_topk_prob": False, "mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 2.0,
    }),
    "glm4-moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", LLAMA | ROUTED | {
        "head_dim": 12, "use_qk_norm": True, "attention_bias": True, "n_group": 3,
        "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5, "norm_topk_prob": False, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "hidden_act": "gelu", "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT | {
        "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
        "hidden_act": "gelu", "rope_parameters": YARN, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 20,
        "initializer_range": 0.03,
    }),
    "minicpm3-plain": ("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT | {
        "q_lora_rank": None, "v_head_dim": None, "dim_model_base": None, "scale_depth": None,
    }),
    "glm4-moe-lite-default": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT | ROUTED),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", LLAMA | {
        "layer_types": ["conv", FULL, "conv"], "conv_bias": True, "conv_L_cache": 4, "norm_eps": 1e-3,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5, "head_dim": 12,
        "tie_word_embeddings": False, "rope_parameters": YARN,
    }),
    "lfm2-tied": ("Lfm2ForCausalLM", "Lfm2Config", LLAMA | {
        "full_attn_idxs": [0, 2], "block_auto_adjust_ff_dim": False, "num_key_value_heads": 4,
    }),
    "lfm2-moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", LLAMA | {
        "layer_types": ["conv", FULL, "conv"], "conv_bias": True, "conv_L_cache": 4, "norm_eps": 1e-3, "head_dim": 12,
        "tie_word_embeddings": False, "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": False, "routed_scaling_factor": 2.0, "rope_parameters": YARN,
    }),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", LLAMA | {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3], "use_sliding_window": True,
        "sliding_window": 6, "max_window_layers": 3, "rms_norm_eps": 1e-3, "rope_parameters": YARN, "head_dim": 12,
        "router_aux_loss_coef": 0.02,
    }),
    "qwen2-moe-all": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu",
    }),
    "qwen3-next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", LLAMA | DELTA | {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "rms_norm_eps": 1e-3,
        "num_key_value_heads": 1, "linear_conv_kernel_dim": 2, "router_aux_loss_coef": 0.02,
        "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", FULL, "linear_attention"],
        "mlp_only_layers": [1], "tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": False,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    "qwen3-next-default": ("Qwen3NextForCausalLM", "Qwen3NextConfig", LLAMA | DELTA | {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "linear_num_value_heads": 2,
        "rms_norm_eps": 1e-2,
    }),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LLAMA | DELTA | {
        "head_dim": 16, "num_hidden_layers": 4, "rms_norm_eps": 1e-3, "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "linear", "rope_theta": 300.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25, "factor": 2.0,
        },
    }),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {
        key: value for key, value in (LLAMA | DELTA).items() if key != "intermediate_size"
    } | {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": [FULL, "linear_attention", "linear_attention"],
        "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
        "attention_bias": True, "router_aux_loss_coef": 0.02,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    "bloom-tied": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4,
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """The same model in both systems: theirs, and ours imported from the directory that theirs wrote."""

    name: str
    theirs: nn.Module
    ours: LoadedModel


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew, so that no bias is 0, no norm 1 and no weight too small to matter."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            centre = parameter.mean().round() if is_norm else 0.0  # Gemma's norms are centred at 0, all others at 1
            parameter.copy_(centre + 0.3 * noise if is_norm else 0.2 * noise)
            if name.endswith("embed_positions.weight"):
                parameter[:2] = 0.0  # OPT never reads these rows
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    return model


def toy_config(name: str) -> Any:
    """The configuration of the toy of that name, without dropout."""
    _, config_class, keys = TOYS[name]
    ids = {"bos_token_id": 2, "eos_token_id": 3, **({} if "pad_token_id" in keys else {"pad_token_id": 0})}
    config = getattr(pytest.importorskip("transformers"), config_class)(**{**keys, **ids})
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    return config


def build(name: str) -> nn.Module:
    """The toy of that name in evaluation mode."""
    config = toy_config(name)
    config._attn_implementation = "eager"
    return randomised(getattr(pytest.importorskip("transformers"), TOYS[name][0])(config)).eval()


@pytest.fixture(scope="session", params=TOYS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Each toy: saved by transformers, imported, loaded."""
    theirs = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder / "theirs")
    CharTokenizer().save(folder / "theirs")
    import_model(folder / "theirs", folder / "ours")
    return Pair(request.param, theirs, load_model(folder / "ours"))
