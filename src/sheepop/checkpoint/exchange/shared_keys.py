"""Keys that every family's ``config.json`` may have."""

from __future__ import annotations

from sheepop.checkpoint.exchange.fields import Field, Refused, fixed, number, unread

_QUANTISED = "says that the weights are quantised. Export them in float16 or bfloat16 first"

# Where the file came from, how it is loaded, heads for other tasks, what a forward pass hands out.
_FILE = unread(
    "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "_flash_attn_2_enabled", "experts_implementation", "use_bfloat16", "torchscript", "xla_device",
    "gradient_checkpointing", "return_dict", "output_attentions", "output_hidden_states", "output_past",
    "tie_last_hidden_states", "is_decoder", "tokenizer_class", "id2label", "label2id", "num_labels", "_num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "custom_pipelines", "prefix", "tf_legacy_loss",
    "ignore_keys_at_rope_validation", "transformers.js_config", "unsloth_version", "unsloth_fixed", "auto_map",
)  # fmt: skip
# Special tokens: their ids are taken from the tokenizer and from generation_config.json.
_TOKENS = unread(
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "eos_token_ids",
)  # fmt: skip
# How text is drawn, which older versions kept here.
_GENERATION = unread(
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "min_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip

SHARED: tuple[Field, ...] = (
    _FILE,
    _TOKENS,
    _GENERATION,
    number("initializer_range", "initial_std", 0.02),
    Refused("quantization_config", _QUANTISED),
    Refused("compression_config", _QUANTISED),
    Refused("per_layer_config", "gives single layers other settings, which SheepOp's network does not have"),
    Refused("pruned_heads", "removes heads from single layers, which SheepOp's network does not have"),
    Refused("sparsity_config", "says that the weights are stored in another form"),
    fixed("is_encoder_decoder", False),
    fixed("add_cross_attention", False, None),
    fixed("cross_attention_hidden_size", None),
    fixed("tie_encoder_decoder", False),
    fixed("chunk_size_feed_forward", 0),
)
