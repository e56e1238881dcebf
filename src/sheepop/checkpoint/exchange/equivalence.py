"""Compares two configurations by what they compute, and names the keys that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sheepop.checkpoint.mapping import score_scale
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
