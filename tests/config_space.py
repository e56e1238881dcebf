"""Configurations of the network drawn at random, every axis on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from hypothesis import strategies as st

from sheepop.model.options import ACTIVATION_NAMES, Initialization, NormKind, NormPosition, PositionEncoding

VOCAB, LENGTH = 11, 10


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def rotary_keys(draw: st.DrawFn, head_dim: int, shared: int | None = None) -> dict[str, Any]:
    scaling = st.sampled_from(
        [
            {"kind": "linear", "factor": 2.0},
            {"kind": "ntk", "factor": 3.0},
            {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16},
            {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 512, "truncate": False, "attention_factor": 0.9},
            {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 32},
            {"kind": "longrope", "factor": 8.0, "original_max_seq_len": 32},
            {"kind": "proportional", "factor": 2.0, "fraction": 0.5},
        ]
    )
    parts = (1.0, 0.75, 0.5, 0.25) if shared is None else (1.0,)
    fractions = [part for part in parts if int(head_dim * part) and int(head_dim * part) % 2 == 0]
    fraction, found = draw(st.sampled_from(fractions)), draw(maybe(scaling))
    if found is not None and found["kind"] == "longrope":
        pairs = (shared or int(head_dim * fraction)) // 2
        found = {**found, "pair_factors": [1.0 + pair for pair in range(pairs)]}
    return {"rotary_fraction": fraction, "rotary_scaling": found}


@st.composite
def expert_keys(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    count = draw(st.sampled_from([2, 3, 4, 5, 6]))
    groups = draw(st.sampled_from([each for each in (1, 2, 3) if count % each == 0]))
    kept = draw(st.integers(1, groups))
    return {
        "count": count,
        "per_token": draw(st.integers(1, count // groups * kept)),
        "groups": groups,
        "groups_per_token": kept,
        "group_top": draw(st.integers(1, count // groups if groups > 1 else 1)),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "d_ff": draw(maybe(st.sampled_from([3, 8]))),
        "shared": draw(st.integers(0, 2)),
        "layers": draw(maybe(layers(num_layers))),
        "scores": draw(st.sampled_from(["softmax", "sigmoid"])),
        "router_bias": draw(st.booleans()),
        "normalize": draw(st.booleans()),
        "router_scale": draw(st.sampled_from([1.0, 0.3])),
        "expert_scales": draw(st.booleans()),
    }


@st.composite
def mixer_keys(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    """Gated convolutions and Gated DeltaNets in all layers but one or more, which are given as `attending`."""
    kinds = st.sampled_from(["attention", "gated_convolution", "gated_delta_net"])
    chosen = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
    chosen[draw(st.integers(0, num_layers - 1))] = "attention"
    heads = draw(st.integers(1, 2))
    sections: dict[str, dict[str, Any]] = {
        "gated_convolution": {"width": draw(st.integers(2, 4)), "bias": draw(st.booleans())},
        "gated_delta_net": {
            "num_key_heads": heads,
            "num_value_heads": heads * draw(st.integers(1, 2)),
            "key_head_dim": draw(st.integers(1, 4)),
            "value_head_dim": draw(st.integers(1, 4)),
            "width": draw(st.integers(2, 4)),
        },
    }
    having = {name: [layer for layer, kind in enumerate(chosen) if kind == name] for name in ("attention", *sections)}
    found = {name: {**section, "layers": having[name]} for name, section in sections.items() if having[name]}
    return {**found, "attending": having["attention"]}


@st.composite
def key_keys(draw: st.DrawFn, keys: dict[str, Any], attending: list[int]) -> dict[str, Any]:
    """Heads of other widths in some layers, values from keys, and last layers that use the keys of earlier ones."""
    found: dict[str, Any] = {"value_norm": draw(st.booleans())}
    slides = keys["sliding_layers"] if keys["sliding_layers"] is not None else attending
    in_pairs = (keys.get("rotary_scaling") or {}).get("kind") == "longrope"  # factors for one width only
    if keys["sliding_window"] and keys["initialization"] != "mup" and not in_pairs:
        fraction = keys.get("rotary_fraction", 1.0)
        widths = [width for width in (4, 8) if int(width * fraction) > 0 and int(width * fraction) % 2 == 0]
        found["sliding_head_dim"] = draw(maybe(st.sampled_from(widths))) if widths else None
    if keys["sliding_window"]:
        counts = [count for count in range(1, keys["num_heads"] + 1) if keys["num_heads"] % count == 0]
        found["sliding_num_kv_heads"] = draw(maybe(st.sampled_from(counts)))
    if keys["short_convolution"] is not None:
        return found

    def kind(layer: int) -> tuple[bool, bool]:
        rotates = keys["rotary_layers"] is None or layer in keys["rotary_layers"]
        return bool(keys["sliding_window"]) and layer in slides, rotates

    most = max(
        count
        for count in range(keys["num_layers"])
        if {kind(layer) for layer in attending if layer >= keys["num_layers"] - count}
        <= {kind(layer) for layer in attending if layer < keys["num_layers"] - count}
    )
    found["shared_kv_layers"] = draw(st.integers(0, most)) if draw(st.booleans()) else most
    last = keys["num_layers"] - found["shared_kv_layers"]
    square = [
        layer for layer in attending if layer < last
        and (keys["value_head_dim"] in (None, keys["head_dim"]) or (found.get("sliding_head_dim") and kind(layer)[0]))
    ]  # fmt: skip
    if square:
        found["keys_as_values"] = draw(maybe(st.lists(st.sampled_from(square), min_size=1, unique=True)))
    return found


def latent_keys(head_dim: int, step: int) -> st.SearchStrategy[dict[str, Any] | None]:
    """Latent attention with a multiple of `step` shared columns; None if the head is too narrow for one."""
    if head_dim <= step:
        return st.none()
    shared = st.sampled_from(range(step, head_dim, step))
    ranks = st.sampled_from([1, 3, 8])
    return st.fixed_dictionaries({"kv_rank": ranks, "q_rank": maybe(ranks), "rope_head_dim": shared})


def layers(num_layers: int) -> st.SearchStrategy[list[int]]:
    return some_of(range(num_layers))


def some_of(choices: Sequence[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(choices), min_size=1, max_size=len(choices), unique=True)


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a network that can be built, every axis drawn on its own."""
    num_layers, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    mixers = draw(mixer_keys(num_layers)) if draw(st.booleans()) else {"attending": list(range(num_layers))}
    attending = mixers.pop("attending")
    encoding = draw(st.sampled_from(get_args(PositionEncoding)))
    head_dim = draw(st.sampled_from([2, 4, 6, 8] if encoding == "rope" else [1, 3, 4]))
    latent = draw(maybe(latent_keys(head_dim, 2 if encoding == "rope" else 1)))
    norm, position = draw(st.sampled_from(get_args(NormKind))), draw(st.sampled_from(get_args(NormPosition)))
    soft_cap, window = draw(maybe(st.just(2.0))), draw(maybe(st.integers(1, 6)))
    initialization = draw(st.sampled_from(get_args(Initialization)))
    keys: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": draw(st.sampled_from([8, 10, 16])),
        "num_layers": num_layers,
        "num_heads": num_kv_heads * (draw(st.integers(1, 3)) if latent is None else 1),
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": draw(maybe(st.sampled_from([1, 3, 8]))),
        "d_ff": draw(maybe(st.sampled_from([5, 16]))),
        "max_seq_len": draw(st.sampled_from([LENGTH, 16])),
        "position_encoding": encoding,
        "embedding_scale": draw(maybe(st.just(1.5))),
        "embedding_norm": draw(st.booleans()),
        "norm": norm,
        "norm_position": position,
        "norm_bias": draw(maybe(st.booleans())) if norm == "layernorm" else None,
        "final_norm": draw(maybe(st.booleans())),
        "latent_attention": latent,
        "qk_norm": draw(maybe(st.sampled_from(["head", "own_head", "width"]))) if latent is None else None,
        "short_convolution": draw(maybe(st.integers(2, 4))) if latent is None else None,
        "ngrams": draw(maybe(st.sampled_from([{"rows": 7}, {"orders": [2, 4], "rows": 50}]))),
        "activation": draw(st.sampled_from(list(ACTIVATION_NAMES))),
        "feed_forward_bias": draw(maybe(st.booleans())),
        "experts": draw(maybe(expert_keys(num_layers))),
        "parallel_residual": draw(st.booleans()) if position != "post" else False,
        "shared_norm": False,
        "head_bias": draw(st.booleans()),
        "residual_scale": draw(st.sampled_from([1.0, 0.4])),
        "logit_scale": draw(st.sampled_from([1.0, 0.4])),
        "attention_bias": draw(maybe(st.booleans())),
        "attention_output_bias": draw(maybe(st.booleans())),
        "attention_soft_cap": soft_cap,
        "attention_sinks": draw(st.booleans()),
        "sliding_window": window,
        "sliding_layers": draw(maybe(some_of(attending))) if window else None,
        "attention_backend": draw(st.sampled_from(["auto", "eager"] + ["sdpa"] * (soft_cap is None))),
        "bias": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "tie_weights": draw(st.booleans()),
        "logit_soft_cap": draw(maybe(st.just(3.0))),
        "initialization": initialization,
        "attention_output_gate": draw(st.booleans()),
        "layer_d_ff": draw(maybe(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))),
        "layer_factor": draw(st.booleans()),
        "layer_inputs": {"width": draw(st.integers(1, 5))} if initialization != "mup" and draw(st.booleans()) else None,
        "rotary_layers": None,
        **mixers,
    }
    if keys["parallel_residual"] and position != "output":
        keys["shared_norm"] = draw(st.booleans())
    if encoding in ("rope", "sinusoidal"):
        keys["position_base"] = draw(st.sampled_from([50.0, 10000.0]))
    if encoding == "rope":
        keys |= draw(rotary_keys(head_dim, latent and latent["rope_head_dim"]))
        keys["rotary_layers"] = draw(maybe(some_of(attending)))
        keys["sliding_position_base"] = draw(maybe(st.just(20.0))) if window else None
    if initialization == "mup":
        keys["mup_base_d_model"] = draw(st.sampled_from([4, 8, 32]))
        keys["mup_base_head_dim"] = draw(maybe(st.just(2)))
    if keys.get("mup_base_head_dim") is None:
        keys["attention_scale"] = draw(maybe(st.just(0.3)))
    if latent is None:
        keys |= draw(key_keys(keys, attending))
    if keys["experts"] is not None and position in ("pre", "sandwich") and not keys["shared_norm"]:
        keys["experts"]["own_norms"] = draw(st.booleans())
    if keys["experts"] is not None and keys["experts"]["shared"]:
        keys["experts"]["shared_gate"] = draw(st.booleans())
    return keys
