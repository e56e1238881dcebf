"""The spellings of positions and windows in old and new files of transformers, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from sheepop.checkpoint.exchange.choice import FAMILIES
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


ORIGINAL = "original_max_position_embeddings"
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def read(family: str, **keys: Any) -> ModelConfig:
    return FAMILIES[family].read_config(keys, "config.json")


def scaling(config: ModelConfig) -> dict[str, Any]:
    assert config.rotary_scaling is not None
    return config.rotary_scaling.model_dump(exclude_none=True)


def test_llama_31_as_published_and_as_transformers_5_writes_it():
    old = read(
        "llama", rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3}, max_position_embeddings=131072
    )
    new = read(
        "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500000, **LLAMA3}, max_position_embeddings=131072
    )
    assert old == new
    assert old.position_base == 500000.0
    assert scaling(old) == {
        "kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192,
    }  # fmt: skip


def test_the_first_spelling_of_the_type():
    assert scaling(read("llama", rope_scaling={"type": "linear", "factor": 4})) == {"kind": "linear", "factor": 4.0}


def test_yarn_as_qwen_publishes_it():
    config = read("qwen2", rope_theta=1e6, max_position_embeddings=32768,
                  rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})  # fmt: skip
    assert scaling(config) == {
        "kind": "yarn", "factor": 4.0, "original_max_seq_len": 32768, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": pytest.approx(1.1386294361119891), "truncate": True,  # 0.1 ln 4 + 1
    }  # fmt: skip


def test_longrope_as_phi_3_publishes_it():
    short, long = [1.05 + 0.02 * pair for pair in range(48)], [1.1 + pair for pair in range(48)]
    for kind in ("su", "longrope"):
        config = read("phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
                      rope_scaling={"type": kind, "short_factor": short, "long_factor": long})  # fmt: skip
        assert config.max_seq_len == 4096
        assert scaling(config) == {
            "kind": "longrope", "factor": 32.0, "original_max_seq_len": 4096, "pair_factors": tuple(short),
            "attention_factor": pytest.approx(1.1902380714238083),  # sqrt(1 + ln 32 / ln 4096) = sqrt(17 / 12)
        }  # fmt: skip


def test_longrope_with_one_table_holds_for_texts_of_any_length():
    config = read("phi3", max_position_embeddings=16384, rope_scaling=LONGROPE | {"long_factor": [1] * 48})
    assert config.max_seq_len == 16384


def test_yarn_with_the_two_scales_of_deepseek():
    config = read("llama", rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                                         "mscale": 1.0, "mscale_all_dim": 0.5})  # fmt: skip
    # (0.1 ln 40 + 1) / (0.05 ln 40 + 1), by hand: 1.3688879 / 1.1844440
    assert scaling(config)["attention_factor"] == pytest.approx(1.1557219, abs=1e-6)


def test_yarn_whose_factor_follows_from_the_two_lengths():
    config = read("llama", max_position_embeddings=16384,
                  rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 4096})  # fmt: skip
    assert scaling(config)["factor"] == 4.0


def test_no_scaling_in_all_its_spellings():
    plain = read("llama")
    for keys in (
        {"rope_scaling": None},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "factor": None}},
        {"rope_theta": 10000, "rope_parameters": {"rope_theta": 10000.0}},
    ):
        assert read("llama", **keys) == plain


@pytest.mark.parametrize(
    ("family", "keys", "parts"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("dynamic", "length of the text")),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, ("original_max_position",)),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, ("long_factor = None", "list of numbers")),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": ["1"]}}, ("short_factor", "list of numbers")),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 47}}, ("pair_factors has 47", "48")),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [0.0] * 48}}, ("pair_factors",)),
        ("phi3", {"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, ("short_mscale", "not know")),
        ("phi3", {"rope_scaling": LONGROPE | {ORIGINAL: 99}, ORIGINAL: 98}, ("contradicts the 98",)),
        ("gemma3_text", {"rope_scaling": LONGROPE}, ("longrope", "linear and yarn and llama3")),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", "supports longrope here")),
        ("llama", {"rope_scaling": {"type": "magic"}}, ("magic", "linear and yarn and llama3 and longrope")),
        ("llama", {"rope_scaling": {"type": ["linear"]}}, ("type",)),
        ("llama", {"rope_scaling": "linear"}, ("rope_scaling = 'linear'", "table")),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, ("factor = '2'",)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, ("factor",)),
        ("llama", {"rope_scaling": {"type": "linear"}}, ("factor",)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3.0}}, ("beta_fast", "not know")),
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, ("contradicts",)),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, ("rope_theta", "contradicts")),
        ("llama", {"rope_scaling": {"type": "default"}, "rope_parameters": {}}, ("given together with",)),
        ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "whole heads")),
        ("llama", {"rope_theta": 0.5}, ("position_base",)),
        ("llama", {"rope_theta": 10**400}, ("rope_theta", "not a finite number")),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": []}}, ("long_factor = []", "empty")),
        ("qwen2", {"rope_parameters": {FULL: {"rope_theta": 1.0}}}, (FULL,)),
        ("gpt_neox", {"rotary_emb_base": 5e3, "rope_theta": 6e3}, ("rope_theta", "contradicts")),
        ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}}, ("none here",)),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, ("rope_theta",)),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, (FULL, "table")),
        ("gemma2", {"layer_types": [SLIDING]}, ("layer_types", "list of 26 entries")),
        ("gemma2", {"layer_types": ["conv"] * 26}, ("layer_types", "layer 0")),
        ("gemma2", {"sliding_window": None}, ("sliding_window", "is not a window, but layer 0 must have one")),
        ("gemma2", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("gemma2", {"query_pre_attn_scalar": 0}, ("query_pre_attn_scalar",)),
        ("gemma3_text", {"sliding_window_pattern": 0}, ("sliding_window_pattern",)),
        ("gemma3_text", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, ("truncate", "rounds")),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", "ignores this key")),
        ("mistral", {"sliding_window": 0}, ("sliding_window",)),
        ("mistral", {"layer_types": [FULL] * 32}, ("layer_types",)),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, ("max_window_layers",)),
        ("qwen3_moe", {"mlp_only_layers": "all"}, ("mlp_only_layers",)),
        ("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step",)),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 5}, ("num_local_experts", "contradicts")),
        ("mixtral", {"router_jitter_noise": 0.1}, ("router_jitter_noise",)),
        ("mixtral", {"num_experts_per_tok": 9}, ("experts.per_token",)),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
        ("gpt2", {"n_layer": 2, "num_hidden_layers": 3}, ("contradicts n_layer",)),
        ("gpt2", {"add_cross_attention": True}, ("add_cross_attention",)),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, ("apply_residual_connection_post_layernorm",)),
        ("bloom", {"slow_but_exact": True}, ("slow_but_exact",)),
        ("cohere2", {"layer_types": [FULL] * 40}, ("layer_types", "no layer that encodes positions")),
        ("olmo3", {"rope_theta": 7e4}, ("rope_theta = 70000.0", "Give rope_parameters")),
        ("smollm3", {"no_rope_layers": [1]}, ("no_rope_layers", "1 entries for 36 layers")),
        ("smollm3", {"no_rope_layer_interval": 0}, ("no_rope_layer_interval", "number of layers")),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, ("sliding_window_pattern", "whole number")),
        ("gemma4_text", {"layer_types": [FULL] * 29 + [SLIDING]}, ("layer_types", "takes another")),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 512}}}, ("11", "the same heads")),
        ("gemma4_text", {"per_layer_config": {"5": {"mlp": 1}}}, ("5", "nothing else")),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4}, ("enable_moe_block", "top_k_experts")),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, ("use_bidirectional_attention",)),
        ("gemma4_text", {"vocab_size_per_layer_input": 7}, ("vocab_size_per_layer_input", "differs from")),
        ("gemma4_text", {"num_kv_shared_layers": 29}, ("shared_kv_layers", "layer 5")),
        ("lfm2_moe", {"use_expert_bias": False}, ("use_expert_bias",)),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 512}, ("do_layer_norm_before",)),
        ("granite", {"logits_scaling": 0}, ("logits_scaling = 0", "factor above 0")),
        ("cohere", {"use_qk_norm": 1}, ("use_qk_norm",)),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_is_not_computed_is_refused(family, keys, parts):
    with pytest.raises(CheckpointError) as caught:
        read(family, **keys)
    for part in parts:
        assert part in str(caught.value)


def test_rates_of_dropout_that_differ_are_left_out_with_a_note():
    for family, keys in (
        ("gpt2", {"resid_pdrop": 0.2}), ("bloom", {"hidden_dropout": 0.1}), ("granite", {"attention_dropout": 0.1}),
    ):  # fmt: skip
        reading = FAMILIES[family].read(keys, "config.json")
        (note,) = reading.notes
        assert reading.config.dropout == 0.0
        assert all(f"{key} = {rate}" in note for key, rate in keys.items())
    assert FAMILIES["gpt2"].read({}, "config.json").notes == ()


def windows(config: ModelConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


def test_windows_of_each_family():
    assert windows(read("mistral", num_hidden_layers=2, sliding_window=7)) == [7, 7]
    assert windows(read("mistral", num_hidden_layers=2, sliding_window=None)) == [None, None]
    assert windows(read("qwen2", num_hidden_layers=3, sliding_window=7, max_window_layers=1)) == [None] * 3
    on = {"num_hidden_layers": 3, "sliding_window": 7, "use_sliding_window": True}
    assert windows(read("qwen2", **on, max_window_layers=1)) == [None, 7, 7]
    assert windows(read("qwen2", **on)) == [None] * 3
    assert windows(read("qwen3", **on, layer_types=[SLIDING, FULL, SLIDING])) == [7, None, 7]
    assert windows(read("qwen3_moe", **on)) == [7, 7, 7]
    assert windows(read("gemma2", num_hidden_layers=4, sliding_window=9)) == [9, None, 9, None]
    assert windows(read("gemma3_text", num_hidden_layers=7, sliding_window=9)) == [9, 9, 9, 9, 9, None, 9]
    assert windows(read("gemma3_text", num_hidden_layers=3, sliding_window_pattern=2)) == [4096, None, 4096]


def test_gemma_3_as_published_and_as_transformers_5_writes_it():
    old = read(
        "gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    new = read("gemma3_text", rope_parameters={
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    })  # fmt: skip
    assert old == new
    assert (old.position_base, old.sliding_position_base, scaling(old)["factor"]) == (1e6, 1e4, 8.0)
    full = read("gemma3_text", layer_types=[FULL] * 26)
    assert (full.sliding_window, full.sliding_position_base) == (None, None)


def test_gemma_4_as_published_and_as_transformers_5_writes_it():
    old = read("gemma4_text", global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True)
    heads = {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 2} for layer in range(5, 30, 6)}
    assert read("gemma4_text", per_layer_config=heads, attention_k_eq_v=True) == old
    assert [old.heads(layer) for layer in (4, 5)] == [(4, 256, 256), (2, 512, 512)]
    assert old.keys_as_values == (5, 11, 17, 23, 29)
    assert scaling(old) | {"kind": "proportional", "factor": 1.0, "fraction": 0.25} == scaling(old)


def test_pythia_as_published():
    config = read(
        "gpt_neox",
        rotary_pct=0.25,
        rotary_emb_base=10000,
        hidden_size=512,
        num_attention_heads=8,
        classifier_dropout=0.1,
    )
    assert (config.rotary_fraction, config.position_base, config.rotary_dim) == (0.25, 10000.0, 16)


def test_bloom_as_published():
    config = read(
        "bloom", n_embed=14336, num_attention_heads=112, n_layer=70, seq_length=2048, pretraining_tp=4,
        attention_softmax_in_fp32=True, bias_dropout_fusion=True, masked_softmax_fusion=True, offset_alibi=100,
        skip_bias_add=True, skip_bias_add_qkv=False, slow_but_exact=False, n_inner=None, unk_token_id=0,
    )  # fmt: skip
    assert (config.d_model, config.num_heads, config.ffn_size, config.max_seq_len) == (14336, 112, 57344, 2048)


def test_gpt2_as_published():
    config = read(
        "gpt2", activation_function="gelu_new", n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024,
        summary_type="cls_index", task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    )  # fmt: skip
    assert (config.dropout, config.ffn_size, config.attention_scale) == (0.1, 3072, None)


def test_qwen3_experts_in_some_layers():
    config = read("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3], num_experts=8)
    assert [config.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert read("qwen3_moe", num_hidden_layers=3, decoder_sparse_step=4).experts is None
    assert read("qwen3_moe", num_experts=0).experts is None


def test_smollm2_as_published():
    config = read(
        "llama", hidden_size=576, initializer_range=0.041666666666666664, intermediate_size=1536, is_llama_config=True,
        max_position_embeddings=8192, num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3,
        pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000,
        tie_word_embeddings=True, torch_dtype="bfloat16", vocab_size=49152,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    )  # fmt: skip
    assert (config.head_dim, config.position_base, config.tie_weights) == (64, 100000.0, True)


def test_phi3_mini_as_published():
    keys = {
        "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_size": 3072,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
        "pad_token_id": 32000, "vocab_size": 32064,
    }  # fmt: skip
    assert read("phi3", **keys, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}).sliding_window == 2047


def test_gemma_2_as_published():
    config = read(
        "gemma2", attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0,
        head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", hidden_size=3584,
        num_attention_heads=16, num_hidden_layers=42, num_key_value_heads=8, query_pre_attn_scalar=224,
        rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096, eos_token_id=[1, 107],
    )  # fmt: skip
    assert config.attention_scale == pytest.approx(224**-0.5)
    assert config.embedding_scale == pytest.approx(3584**0.5)
    assert (config.activation, config.tie_weights) == ("geglu_tanh", True)
