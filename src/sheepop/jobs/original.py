"""Translates the ``config.json`` of the original SheepOp system: a table from its keys to ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sheepop.core.errors import ConfigError

# Keys that only the original system has; one of them identifies its files.
_TELLING = {
    "model": {"layer_norm_eps"},
    "training": {"batch_size", "gradient_accumulation_steps", "use_amp", "save_dir"},
    "data": {"data_dir"},
}

# By section, the keys that mean the same here.
_SAME = {
    "model": {"vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "max_seq_len", "dropout", "activation",
              "bias", "tie_weights"},
    "training": {"max_epochs", "learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "log_interval",
                 "eval_interval"},
    "data": {"max_length", "stride", "num_workers"},
}  # fmt: skip
# The keys that have another name here. `translate_original` converts the other keys.
_RENAMED = {("model", "layer_norm_eps"): "norm_eps", ("training", "batch_size"): "micro_batch_size"}
_CONVERTED = {
    ("training", "gradient_accumulation_steps"), ("training", "use_amp"), ("training", "save_dir"),
    ("data", "data_dir"),
}  # fmt: skip
_TOP = {"device", "seed"}


def is_original(tree: Mapping[str, Any]) -> bool:
    """Whether a config file is for the original system."""
    return any(
        isinstance(tree.get(section), Mapping) and keys & tree[section].keys() for section, keys in _TELLING.items()
    )


def translate_original(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under our keys.

    Also sets what was fixed in the original: sinusoidal positions, LayerNorm, characters as tokens, chunks of each
    document instead of packing, AdamW's betas 0.9 and 0.999. Raises `ConfigError` for unknown keys.
    """
    result: dict[str, Any] = {
        "model": {"position_encoding": "sinusoidal", "norm": "layernorm"},
        "tokenizer": {"algorithm": "char"},
        "data": {"packing": False},
        "training": {"optimizer": "adamw", "betas": (0.9, 0.999)},
    }
    for section, settings in tree.items():
        if section in _TOP:
            result[section] = settings
            continue
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{section}: unknown key in a config of the original system.")
        for key, value in settings.items():
            name = key if key in _SAME.get(section, ()) else _RENAMED.get((section, key))
            if name is not None:
                result[section][name] = value
            elif (section, key) not in _CONVERTED:
                raise ConfigError(f"{section}.{key}: unknown key in a config of the original system.")
    training = tree.get("training", {})
    micro, accumulation = training.get("batch_size"), training.get("gradient_accumulation_steps", 1)
    if micro is not None:
        if not isinstance(micro, int) or not isinstance(accumulation, int) or accumulation < 1:
            raise ConfigError(
                f"training.gradient_accumulation_steps = {accumulation!r}, training.batch_size = {micro!r}: "
                "both must be whole numbers of at least 1."
            )
        result["training"]["global_batch_size"] = micro * accumulation
    elif "gradient_accumulation_steps" in training:
        raise ConfigError("training.gradient_accumulation_steps needs training.batch_size as well.")
    if "use_amp" in training:
        result["training"]["precision"] = "auto" if training["use_amp"] else "fp32"
    if "save_dir" in training:
        result["output_dir"] = training["save_dir"]
    data_dir = tree.get("data", {}).get("data_dir")
    if data_dir is not None:
        result["data"]["paths"] = [data_dir]
    return result
