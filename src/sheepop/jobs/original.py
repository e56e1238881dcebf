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

# (section, key) of the original -> (section, key) here. `translate_original` converts the other keys.
_TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("model", "vocab_size"): ("model", "vocab_size"),
    ("model", "d_model"): ("model", "d_model"),
    ("model", "num_layers"): ("model", "num_layers"),
    ("model", "num_heads"): ("model", "num_heads"),
    ("model", "d_ff"): ("model", "d_ff"),
    ("model", "max_seq_len"): ("model", "max_seq_len"),
    ("model", "dropout"): ("model", "dropout"),
    ("model", "activation"): ("model", "activation"),
    ("model", "layer_norm_eps"): ("model", "norm_eps"),
    ("model", "bias"): ("model", "bias"),
    ("model", "tie_weights"): ("model", "tie_weights"),
    ("training", "batch_size"): ("training", "micro_batch_size"),
    ("training", "max_epochs"): ("training", "max_epochs"),
    ("training", "learning_rate"): ("training", "learning_rate"),
    ("training", "weight_decay"): ("training", "weight_decay"),
    ("training", "warmup_steps"): ("training", "warmup_steps"),
    ("training", "max_grad_norm"): ("training", "max_grad_norm"),
    ("training", "log_interval"): ("training", "log_interval"),
    ("training", "eval_interval"): ("training", "eval_interval"),
    ("training", "save_dir"): ("output_dir",),
    ("data", "max_length"): ("data", "max_length"),
    ("data", "stride"): ("data", "stride"),
    ("data", "num_workers"): ("data", "num_workers"),
}
_ARITHMETIC = {("training", "gradient_accumulation_steps"), ("training", "use_amp"), ("data", "data_dir")}
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
            if (section, key) in _TABLE:
                _put(result, _TABLE[section, key], value)
            elif (section, key) not in _ARITHMETIC:
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
    data_dir = tree.get("data", {}).get("data_dir")
    if data_dir is not None:
        result["data"]["paths"] = [data_dir]
    return result


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
