"""The model families that SheepOp can import and export, and the choice of one for a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sheepop.checkpoint.exchange.families import (
    deepseek,
    descendants,
    gemma,
    gemma4,
    hybrid,
    layer_norm,
    llama,
    opt,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.expected_tensors import refuse_own_parts
from sheepop.checkpoint.mapping import score_scale
from sheepop.core.errors import CheckpointError, first_few
from sheepop.model.config import ModelConfig

# Keys of initialisation, training and implementation, which do not affect the results.
_TRAINING = frozenset(
    {"preset", "bias", "initialization", "initial_std", "dropout", "attention_backend", "mup_base_head_dim"}
)
_EXPERT_TRAINING = frozenset({"load_balancing_loss", "router_z_loss", "bias_update_rate", "layers", "d_ff"})
# Keys whose effect is compared for each layer, or as the number derived from them.
_BY_EFFECT = frozenset(
    {
        "position_base", "sliding_position_base", "rotary_scaling", "rotary_fraction", "sliding_window",
        "sliding_layers", "rotary_layers", "attention_scale", "experts", "d_ff", "mup_base_d_model", "logit_scale",
    }
)  # fmt: skip


def differences(config: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the keys in which two networks compute different results, with both values."""
    here, there = _effects(config), _effects(other)
    names = dict.fromkeys([*here, *there])
    return {name: (here.get(name), there.get(name)) for name in names if not _equal(here.get(name), there.get(name))}


def training_differences(config: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the differing keys that matter only for further training, with both values."""
    here, there = dict(_training(config)), dict(_training(other))
    return {name: (here[name], there.get(name)) for name in here if not _equal(here[name], there.get(name))}


def _training(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    yield "dropout", config.dropout
    if config.experts is not None:
        for name in ("load_balancing_loss", "router_z_loss", "bias_update_rate"):
            yield f"experts.{name}", getattr(config.experts, name)


def _effects(config: ModelConfig) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    effects = {name: settings[name] for name in settings if name not in _TRAINING | _BY_EFFECT}
    layers = range(config.num_layers)
    effects["sliding_window"] = [config.window(layer) for layer in layers]
    effects["attention_scale"] = score_scale(config)
    effects["logit_scale"] = config.output_scale
    effects["experts.layers"] = [config.has_experts(layer) for layer in layers]
    if config.experts is not None:
        for name, value in config.experts.model_dump(mode="json").items():
            if name not in _EXPERT_TRAINING:
                effects[f"experts.{name}"] = value
        if any(effects["experts.layers"]):
            effects["experts.d_ff"] = config.experts.d_ff or config.ffn_size
    if not all(effects["experts.layers"]):
        effects["d_ff"] = config.ffn_size
    effects.update(_positions(config))
    return effects


def _positions(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    if config.position_encoding == "sinusoidal":
        yield "position_base", config.position_base
    if config.position_encoding != "rope":
        return
    yield "rotary_fraction", config.rotary_dim
    own = config.sliding_position_base
    layers = range(config.num_layers)
    yield "rotary_layers", [config.rotates(layer) for layer in layers]
    # The angles of a layer that does not rotate do not matter.
    apart = [own is not None and config.window(layer) is not None for layer in layers]
    scaling = None if config.rotary_scaling is None else config.rotary_scaling.model_dump(mode="json")
    bases = [own if alone else config.position_base for alone in apart]
    yield "position_base", [base if config.rotates(layer) else None for layer, base in enumerate(bases)]
    scalings = [None if alone else scaling for alone in apart]
    yield "rotary_scaling", [found if config.rotates(layer) else None for layer, found in enumerate(scalings)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# An export tries them in this order.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, gemma.GEMMA2, gemma.GEMMA3, descendants.PHI3,
        descendants.OLMO2, llama.MIXTRAL, llama.QWEN3_MOE, layer_norm.GPT2, layer_norm.GPT_NEOX, layer_norm.BLOOM,
        descendants.SMOLLM3, layer_norm.COHERE2, descendants.EXAONE4, descendants.GRANITE, descendants.OLMO3,
        descendants.GLM4, descendants.SEED_OSS, descendants.ARCEE, layer_norm.STABLELM, layer_norm.STARCODER2,
        gemma.GEMMA, layer_norm.COHERE, descendants.ERNIE4_5, opt.OPT, layer_norm.PHI, layer_norm.GPTJ,
        descendants.GPT_OSS, hybrid.LFM2, llama.QWEN2_MOE, hybrid.QWEN3_NEXT, hybrid.QWEN3_5, hybrid.QWEN3_5_MOE,
        deepseek.DEEPSEEK_V2, deepseek.DEEPSEEK_V3, deepseek.GLM4_MOE_LITE, deepseek.GLM4_MOE, deepseek.MINICPM3,
        gemma4.GEMMA4, hybrid.LFM2_MOE, descendants.GRANITE_MOE, descendants.OLMOE,
    )
}  # fmt: skip


# An import also reads these, for which transformers has no class.
IMPORTED = {**FAMILIES, "minicpm": descendants.MINICPM}


def choose_family(config: ModelConfig, preferred: str | None = None) -> Family:
    """Returns the first family with which transformers computes the same results; tries `preferred` first.

    Raises `CheckpointError` if there is none, with the keys that each family cannot express.
    """
    refuse_own_parts(config, "transformers")
    reasons: dict[str, list[str]] = {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred):
        reasons[family.model_type] = obstacles(family, config)
        if not reasons[family.model_type]:
            return family
    nearest = sorted(reasons.items(), key=lambda entry: len(entry[1]))
    lines = "\n".join(f"  {name}: {first_few(found, 4)}" for name, found in nearest)
    raise CheckpointError(f"No model family of transformers can express this model. The obstacles:\n{lines}")


def obstacles(family: Family, config: ModelConfig) -> list[str]:
    """Returns the keys of `config` that the family cannot express, with both values; empty if it can express all."""
    try:
        back = family.read_config(family.write_config(config), family.model_type)
    except CheckpointError as error:
        return [str(error)]
    found = [f"{key} ({_compared(here, there)})" for key, (here, there) in differences(config, back).items()]
    if family.whole_heads and config.d_model % config.num_heads:
        found.append(f"d_model ({config.d_model} is not a multiple of num_heads = {config.num_heads})")
    return found


def _compared(here: Any, there: Any) -> str:
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        layer = next(index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
        return f"{_named(here[layer])} here, {_named(there[layer])} there, in layer {layer}"
    return f"{_named(here)} here, {_named(there)} there"


def _named(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
