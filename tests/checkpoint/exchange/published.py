"""The ``config.json`` of published models, key for key, with the number of their parameters as their makers give it.

Facts about files of others: what their makers and several versions of transformers have left in them has to be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A configuration, the parameters of the model, and what it comes to in our terms."""

    parameters: int
    expected: Mapping[str, Any]
    keys: Mapping[str, Any]


PUBLISHED: dict[str, Published] = {
    "gpt2": Published(
        124_439_808,
        {"d_model": 768, "num_layers": 12, "num_heads": 12, "max_seq_len": 1024, "dropout": 0.1, "tie_weights": True},
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "gpt2-medium": Published(
        354_823_168,
        {"d_model": 1024, "num_layers": 24, "num_heads": 16},
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16,
            "n_layer": 24, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
            "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "gpt2-xl": Published(
        1_557_611_200,
        {"d_model": 1600, "num_layers": 48, "num_heads": 25, "head_size": 64},
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600, "n_head": 25,
            "n_layer": 48, "n_positions": 1024, "output_past": True, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "distilgpt2": Published(
        81_912_576,
        {"d_model": 768, "num_layers": 6, "num_heads": 12},
        {
            "_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
            "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02, "label2id": {"LABEL_0": 0},
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "llama-7b": Published(
        6_738_415_616,
        {"d_model": 4096, "max_seq_len": 2048, "norm_eps": 1e-6},
        {
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 2048, "max_sequence_length": 2048, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.0.dev0",
            "use_cache": True, "vocab_size": 32000,
        },
    ),
    "Llama-2-7b-hf": Published(
        6_738_415_616,
        {"d_model": 4096, "num_layers": 32, "num_heads": 32, "kv_heads": 32, "ffn_size": 11008, "max_seq_len": 4096},
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "Llama-3.1-8B": Published(
        8_030_261_248,
        {"d_model": 4096, "num_layers": 32, "kv_heads": 8, "position_base": 5e5, "max_seq_len": 131072},
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
    ),
    "Llama-3.2-1B-Instruct": Published(
        1_235_814_400,
        {"d_model": 2048, "num_layers": 16, "kv_heads": 8, "head_size": 64, "tie_weights": True},
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
    ),
    "TinyLlama-1.1B": Published(
        1_100_048_384,
        {"d_model": 2048, "num_layers": 22, "kv_heads": 4, "max_seq_len": 2048},
        {
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
            "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32",
            "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "deepseek-coder-1.3b": Published(
        1_346_471_936,
        {"d_model": 2048, "num_layers": 24, "position_base": 1e5, "max_seq_len": 16384},
        {
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 32013, "eos_token_id": 32014,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5504,
            "max_position_embeddings": 16384, "model_type": "llama", "num_attention_heads": 16,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "vocab_size": 32256,
        },
    ),
    "SmolLM2-135M": Published(
        134_515_008,
        {"d_model": 576, "num_layers": 30, "num_heads": 9, "kv_heads": 3, "position_base": 1e5, "tie_weights": True},
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
            "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
            "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "vocab_size": 49152,
        },
    ),
    "SmolLM2-135M-Instruct": Published(
        134_515_008,
        {"d_model": 576, "max_seq_len": 8192},
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
            "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
            "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
        },
    ),
    "Mistral-7B-v0.1": Published(
        7_241_732_096,
        {"d_model": 4096, "num_layers": 32, "kv_heads": 8, "sliding_window": 4096, "position_base": 1e4},
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "Mistral-7B-v0.3": Published(
        7_248_023_552,
        {"sliding_window": None, "position_base": 1e6},
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
        },
    ),
    "Mistral-Nemo-Base-2407": Published(
        12_247_782_400,
        {"d_model": 5120, "head_size": 128, "num_layers": 40, "max_seq_len": 131072},
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
            "vocab_size": 131072,
        },
    ),
    "Mixtral-8x7B-v0.1": Published(
        46_702_792_704,
        {"d_model": 4096, "num_layers": 32, "kv_heads": 8, "sliding_window": None, "position_base": 1e6},
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5-0.5B": Published(
        494_032_768,
        {"d_model": 896, "num_layers": 24, "num_heads": 14, "kv_heads": 2, "sliding_window": None, "tie_weights": True},
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "Qwen2.5-7B-Instruct": Published(
        7_615_616_512,
        {"d_model": 3584, "num_layers": 28, "kv_heads": 4, "tie_weights": False},
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
        },
    ),
    "Qwen3-0.6B": Published(
        596_049_920,
        {"d_model": 1024, "num_layers": 28, "num_heads": 16, "kv_heads": 8, "head_size": 128, "position_base": 1e6},
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": Published(
        30_532_122_624,
        {"d_model": 2048, "num_layers": 48, "num_heads": 32, "kv_heads": 4, "head_size": 128, "tie_weights": False},
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "gemma-2-2b": Published(
        2_614_341_888,
        {"d_model": 2304, "num_layers": 26, "num_heads": 8, "kv_heads": 4, "attention_soft_cap": 50.0,
         "logit_soft_cap": 30.0, "sliding_window": 4096, "tie_weights": True},
        {
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
            "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "torch_dtype": "float32", "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
        },
    ),
    "gemma-3-1b-pt": Published(
        999_885_952,
        {"d_model": 1152, "num_layers": 26, "num_heads": 4, "kv_heads": 1, "sliding_window": 512,
         "position_base": 1e6, "sliding_position_base": 1e4, "attention_soft_cap": None, "tie_weights": True},
        {
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
            "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
            "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
        },
    ),
    "gemma-3-270m": Published(
        268_098_176,
        {"d_model": 640, "num_layers": 18, "num_heads": 4, "kv_heads": 1, "sliding_window": 512},
        {
            "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
            "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 640, "initializer_range": 0.02, "intermediate_size": 2048,
            "layer_types": [*(["sliding_attention"] * 5 + ["full_attention"])] * 3,
            "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
            "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
            "sliding_window": 512, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0",
            "use_bidirectional_attention": False, "use_cache": True, "vocab_size": 262144,
        },
    ),
    "Phi-3-mini-4k-instruct": Published(
        3_821_079_552,
        {"d_model": 3072, "num_layers": 32, "num_heads": 32, "kv_heads": 32, "sliding_window": 2047},
        {
            "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
            },
            "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
            "use_cache": True, "vocab_size": 32064,
        },
    ),
    "Phi-3-mini-128k-instruct": Published(
        3_821_079_552,
        {"d_model": 3072, "num_layers": 32, "max_seq_len": 4096, "sliding_window": 262144},
        {
            "_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
            },
            "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            # The published factors are other numbers, as many.
            "rope_scaling": {
                "long_factor": [1.1 + pair for pair in range(48)], "short_factor": [1.05 + pair for pair in range(48)],
                "type": "longrope",
            },
            "sliding_window": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
        },
    ),
    "Phi-4-mini-instruct": Published(
        3_836_021_760,
        {"d_model": 3072, "kv_heads": 8, "max_seq_len": 4096, "rotary_dim": 96, "tie_weights": True},
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"},
            "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
            "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
            "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.0 + pair for pair in range(48)], "short_factor": [1.0] * 48, "type": "longrope",
            },
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
        },
    ),
    "phi-4": Published(
        14_659_507_200,
        {"d_model": 5120, "num_layers": 40, "num_heads": 40, "kv_heads": 10, "sliding_window": None},
        {
            "_name_or_path": "pretrained/phi-4", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
            "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
            "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
            "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
        },
    ),
    "OLMo-2-0425-1B": Published(
        1_484_916_736,
        {"d_model": 2048, "num_layers": 16, "num_heads": 16, "position_base": 5e5, "norm_position": "output"},
        {
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
        },
    ),
    "pythia-70m": Published(
        70_426_624,
        {"d_model": 512, "num_layers": 6, "num_heads": 8, "rotary_dim": 16, "parallel_residual": True},
        {
            "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
            "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8,
            "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
            "use_parallel_residual": True, "vocab_size": 50304,
        },
    ),
    "gpt-neox-20b": Published(
        20_554_567_680,
        {"d_model": 6144, "num_layers": 44, "num_heads": 64, "rotary_dim": 24, "activation": "gelu_tanh"},
        {
            "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
            "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 64,
            "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.19.0.dev0", "use_cache": True,
            "vocab_size": 50432,
        },
    ),
    "bloom-560m": Published(
        559_214_592,
        {"d_model": 1024, "num_layers": 24, "num_heads": 16, "max_seq_len": 2048, "embedding_norm": True},
        {
            "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024,
            "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
            "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
            "transformers_version": "4.20.0", "use_cache": True, "vocab_size": 250880,
            "architectures": ["BloomForCausalLM"],
        },
    ),
    "SmolLM3-3B": Published(
        3_075_098_624,
        {
            "d_model": 2048, "num_layers": 36, "position_base": 5000000.0, "tie_weights": True, "rotary_layers":
            tuple(layer for layer in range(36) if layer % 4 != 3),
        },
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
            "use_sliding_window": False, "vocab_size": 128256,
        },
    ),
    "c4ai-command-r7b-12-2024": Published(
        8_028_033_024,
        {
            "num_heads": 32, "kv_heads": 8, "logit_scale": 0.25, "shared_norm": True, "sliding_window": 4096,
            "rotary_layers": tuple(layer for layer in range(32) if layer % 4 != 3), "sliding_layers": tuple(layer for
            layer in range(32) if layer % 4 != 3),
        },
        {
            "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096,
            "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type":
            "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
            "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "transformers_version": "4.48.0.dev0",
            "use_cache": True, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block":
            True, "use_parallel_embedding": True, "vocab_size": 256000,
        },
    ),
    "EXAONE-4.0-1.2B": Published(
        1_279_391_488,
        {
            "norm_position": "output", "qk_norm": "head", "rotary_layers": None, "sliding_window": None,
        },
        {
            "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size":
            4096, "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536, "model_type": "exaone4",
            "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8, "pad_token_id": 0,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window":
            None, "sliding_window_pattern": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": True, "vocab_size": 102400,
        },
    ),
    "granite-3.1-2b-instruct": Published(
        2_533_531_648,
        {
            "embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.015625, "logit_scale": 0.125,
        },
        {
            "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
            "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 5000000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0",
            "use_cache": True, "vocab_size": 49155,
        },
    ),
    "granite-3.1-1b-a400m-instruct": Published(
        1_334_628_352,
        {
            "embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.015625, "logit_scale": 1 / 6,
        },
        {
            "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 512,
            "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
            "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1500000.0, "router_aux_loss_coef": 0.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0",
            "use_cache": True, "vocab_size": 49155,
        },
    ),
    "OLMoE-1B-7B-0924": Published(
        6_919_161_856,
        {
            "norm_position": "pre", "qk_norm": "width", "d_ff": 1024, "num_kv_heads": 16, "position_base": 10000.0,
        },
        {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range":
            0.02, "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
            "use_cache": True, "vocab_size": 50304,
        },
    ),
    "Olmo-3-1025-7B": Published(
        7_298_011_136,
        {
            "sliding_window": 4096, "position_base": 500000.0, "sliding_position_base": 500000.0, "norm_position":
            "output", "qk_norm": "width",
        },
        {
            "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id":
            100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
            "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836,
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type":
            "yarn"}, "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
            "transformers_version": "4.57.0", "use_cache": False, "vocab_size": 100278,
        },
    ),
    "GLM-4-9B-0414": Published(
        9_400_279_040,
        {
            "norm_position": "sandwich", "rotary_dim": 64, "attention_bias": True, "attention_output_bias": False,
        },
        {
            "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id":
            [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range":
            0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": True, "vocab_size": 151552,
        },
    ),
    "Seed-OSS-36B-Base": Published(
        36_151_104_512,
        {
            "head_size": 128, "num_heads": 80, "attention_bias": True, "dropout": 0.0,
        },
        {
            "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
            "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings":
            524288, "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True, "vocab_size": 155136,
        },
    ),
    "AFM-4.5B": Published(
        4_619_184_640,
        {
            "activation": "relu_squared", "num_heads": 20, "max_seq_len": 65536,
        },
        {
            "architectures": ["ArceeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id":
            128000, "eos_token_id": 128003, "head_dim": 128, "hidden_act": "relu2", "hidden_size": 2560,
            "initializer_range": 0.02, "intermediate_size": 18432, "max_position_embeddings": 65536, "mlp_bias":
            False, "model_type": "arcee", "num_attention_heads": 20, "num_hidden_layers": 36, "num_key_value_heads":
            4, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale":
            1.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"}, "rope_theta":
            10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True, "vocab_size":
            128004,
        },
    ),
    "stablelm-2-1_6b": Published(
        1_644_515_328,
        {
            "rotary_dim": 16, "norm_bias": True, "attention_bias": True, "feed_forward_bias": False, "shared_norm":
            False,
        },
        {
            "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act":
            "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "layer_norm_eps":
            1e-05, "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
            "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
            "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.38.0", "use_cache":
            True, "use_qkv_bias": True, "vocab_size": 100352,
        },
    ),
    "starcoder2-3b": Published(
        3_030_371_328,
        {
            "sliding_window": 4096, "dropout": 0.1, "initial_std": 0.018042, "tie_weights": True,
        },
        {
            "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
            "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288, "layer_norm_epsilon":
            1e-05, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
            "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
            "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
            "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096,
            "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_bias": True, "use_cache": True,
            "vocab_size": 49152,
        },
    ),
    "gemma-2b": Published(
        2_506_172_416,
        {
            "activation": "geglu_tanh", "kv_heads": 1, "tie_weights": True,
        },
        {
            "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id":
            2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings":
            8192, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
            "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype":
            "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
        },
    ),
    "c4ai-command-r-plus": Published(
        103_810_674_688,
        {"qk_norm": "own_head", "logit_scale": 0.8333333333333334, "d_model": 12288, "kv_heads": 8},
        {
            "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 12288,
            "initializer_range": 0.02, "intermediate_size": 33792, "layer_norm_eps": 1e-05,
            "logit_scale": 0.8333333333333334, "max_position_embeddings": 8192, "model_max_length": 131072,
            "model_type": "cohere", "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8,
            "pad_token_id": 0, "rope_theta": 75000000.0, "torch_dtype": "float16",
            "transformers_version": "4.40.0.dev0", "use_cache": True, "use_qk_norm": True, "vocab_size": 256000,
        },
    ),
    "aya-23-8B": Published(
        8_028_033_024,
        {
            "shared_norm": True, "logit_scale": 0.0625, "norm_bias": False, "rotary_layers": None,
        },
        {
            "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id":
            5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings":
            8192, "model_type": "cohere", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads":
            8, "pad_token_id": 0, "rope_theta": 10000, "torch_dtype": "float16", "transformers_version":
            "4.40.0.dev0", "use_cache": True, "use_qk_norm": False, "vocab_size": 256000,
        },
    ),
    "ERNIE-4.5-0.3B-PT": Published(
        360_748_032,
        {
            "head_size": 128, "num_layers": 18, "bias": False,
        },
        {
            "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
            "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
            "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_bias": False, "use_cache": False,
            "vocab_size": 103424,
        },
    ),
    "opt-125m": Published(
        125_239_296 - 2 * 768,  # without the two rows of positions that nothing reads
        {"d_ff": 3072, "max_seq_len": 2048, "activation": "relu", "dropout": 0.0},
        {
            "_name_or_path": "opt-125m", "activation_dropout": 0.0, "activation_function": "relu", "architectures":
            ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
            "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop":
            0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 12,
            "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
            "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim":
            768,
        },
    ),
    "phi-2": Published(
        2_779_683_840,
        {"rotary_dim": 32, "shared_norm": True, "head_bias": True, "dropout": 0.0},
        {
            "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
            "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
            "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type":
            "phi", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version":
            "4.37.0", "use_cache": True, "vocab_size": 51200,
        },
    ),
    "gpt-j-6b": Published(
        6_050_882_784,
        {"rotary_dim": 64, "shared_norm": True, "head_bias": True, "attention_bias": False, "d_ff": 16384},
        {
            "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
            "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head":
            16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True,
            "rotary_dim": 64, "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
            "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
            "use_cache": True, "vocab_size": 50400,
        },
    ),
    "gpt-oss-20b": Published(
        20_914_757_184,
        {"attention_sinks": True, "sliding_layers": tuple(range(0, 24, 2)), "activation": "swiglu_clamped"},
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size":
            2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id":
            199999, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
            "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
            "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
        },
    ),
    "DeepSeek-V2-Lite": Published(
        15_706_484_224,
        {"head_size": 192, "rotary_dim": 64, "value_size": 128, "cached_heads": (1, 64, 512)},
        {
            "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map":
            {"AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModel":
            "modeling_deepseek.DeepseekV2Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
            "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
            "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
            "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
            "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor":
            1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
            "topk_method": "greedy", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
            "v_head_dim": 128, "vocab_size": 102400,
        },
    ),
    "DeepSeek-V2": Published(
        235_741_434_880,
        {"num_heads": 128, "d_model": 5120, "cached_heads": (1, 64, 512)},
        {
            "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map":
            {"AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModel":
            "modeling_deepseek.DeepseekV2Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
            "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288,
            "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
            "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160,
            "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6,
            "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
            "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor":
            16.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 3,
            "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
            "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
        },
    ),
    "DeepSeek-V3-bf16": Published(
        671_026_404_352,
        {"attention_scale": 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, "cached_heads": (1, 64, 512)},
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map":
            {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel":
            "modeling_deepseek.DeepseekV3Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
            "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
            "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor":
            2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4,
            "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
            "v_head_dim": 128, "vocab_size": 129280,
        },
    ),
    "Moonlight-16B-A3B": Published(
        15_960_108_544,
        {"rotary_scaling": None, "norm_eps": 1e-5, "attention_scale": None},
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map":
            {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel":
            "modeling_deepseek.DeepseekV3Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1,
            "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type":
            "deepseek_v3", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6,
            "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
            "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype":
            "bfloat16", "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
        },
    ),
    "GLM-4.7-Flash": Published(
        29_943_390_976,
        {"head_size": 256, "value_size": 256, "cached_heads": (1, 64, 512)},
        {
            "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype":
            "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
            "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
            "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
            "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
            "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "transformers_version":
            "5.0.0rc0", "v_head_dim": 256, "vocab_size": 154880,
        },
    ),
    "GLM-4.5-Air": Published(
        106_852_245_504,
        {"rotary_dim": 64, "kv_heads": 8, "attention_bias": True, "qk_norm": None},
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id":
            [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings":
            131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
            "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
            "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
        },
    ),
    "MiniCPM3-4B": Published(
        4_073_875_968,
        {"embedding_scale": 12.0, "logit_scale": 0.1, "value_size": 64, "cached_heads": (1, 32, 256)},
        {
            "architectures": ["MiniCPM3ForCausalLM"], "auto_map": {"AutoConfig":
            "configuration_minicpm.MiniCPM3Config", "AutoModel": "modeling_minicpm.MiniCPM3Model",
            "AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM"}, "bos_token_id": 1, "dim_model_base": 256,
            "eos_token_id": [2, 73440], "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1,
            "intermediate_size": 6400, "kv_lora_rank": 256, "max_position_embeddings": 32768, "model_type":
            "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40, "pad_token_id":
            2, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": [1.0591234137867171, 1.1241891283591912, 1.2596935748670968,
            1.5380380402321725, 2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549,
            10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266, 16.461961959767827,
            16.740306425132907, 16.87581087164081, 16.940876586213285], "original_max_position_embeddings": 32768,
            "short_factor": [1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725,
            2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451,
            13.062047352306353, 14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907,
            16.87581087164081, 16.940876586213285], "type": "longrope"}, "scale_depth": 1.4, "scale_emb": 12,
            "torch_dtype": "bfloat16", "transformers_version": "4.41.0", "use_cache": True, "vocab_size": 73448,
        },
    ),
    "gemma-4-e2b": Published(
        4_628_569_379,
        {"num_layers": 35, "head_dim": 512, "sliding_head_dim": 256, "kv_heads": 1, "shared_kv_layers": 20,
         "layer_d_ff": (6144,) * 15 + (12288,) * 20, "sliding_window": 512, "position_base": 1e6},
        {
            "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144,
            "num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512, "rms_norm_eps": 1e-6,
            "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "num_key_value_heads": 1,
            "num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256, "sliding_window": 512,
            "max_position_embeddings": 131072, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "layer_types": [*(["sliding_attention"] * 4 + ["full_attention"])] * 7,
        },
    ),
    "lfm2-350m": Published(
        354_483_968,
        {"d_ff": 4608, "num_layers": 16, "tie_weights": True},
        {
            "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim":
            6656, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
            "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init":
            True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024,
            "conv_use_xavier_init": True, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size":
            1024, "initializer_range": 0.02, "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps":
            1e-05, "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version":
            "4.55.0.dev0", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
        },
    ),
    "lfm2-8b-a1b": Published(
        8_339_929_856,
        {"d_ff": 7168, "num_layers": 24, "tie_weights": True, "kv_heads": 8},
        {
            "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048,
            "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 24,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-05,
            "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1000000.0, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
            "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
            "layer_types": [
                "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
            ],
        },
    ),
    "qwen1.5-moe-a2.7b": Published(
        14_315_784_192,
        {"attention_bias": True, "sliding_window": None},
        {
            "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
            "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob":
            False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "qwen3-next-80b-a3b": Published(
        79_674_391_296,
        {"attention_output_gate": True, "rotary_dim": 64, "d_ff": 5120},
        {
            "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
            "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True,
            "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
            "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps":
            1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size":
            151936,
        },
    ),
    "qwen3.5-27b, text": Published(
        26_895_998_464,
        {"attention_output_gate": True, "rotary_dim": 64, "head_size": 256},
        {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408, "layer_types":
            [*["linear_attention"] * 3, "full_attention"] * 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim":
            128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type":
            "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads":
            24, "num_hidden_layers": 64, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "rms_norm_eps":
            1e-06, "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "tie_word_embeddings":
            False, "use_cache": True, "vocab_size": 248320,
        },
    ),
    "qwen3.5-35b-a3b, text": Published(
        34_660_610_688,
        {"attention_output_gate": True, "rotary_dim": 64, "num_kv_heads": 2},
        {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "layer_types": [*["linear_attention"] * 3,
            "full_attention"] * 10, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads":
            16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_experts": 256,
            "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor":
            0.25, "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}, "router_aux_loss_coef":
            0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "use_cache": True,
            "vocab_size": 248320,
        },
    ),
}  # fmt: skip
