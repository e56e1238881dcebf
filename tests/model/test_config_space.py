"""Any configuration either works in every way in which a network is run, or is refused in words."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, build_model, cross_entropy
from sheepop.model.config import ACTIVATION_NAMES, Initialization, NormKind, NormPosition, PositionEncoding

from ..reading import read_in_pieces

VOCAB, LENGTH = 11, 10
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [5, 5, 5, 2, 5, 5, 5, 5, 5, 5]])
STARTS = [[0, 4, 10], [0, 3, 4, 10]]


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def rotary_keys(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    scaling = st.sampled_from(
        [
            {"kind": "linear", "factor": 2.0},
            {"kind": "ntk", "factor": 3.0},
            {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16},
            {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 512, "truncate": False, "attention_factor": 0.9},
            {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 32},
            {"kind": "longrope", "factor": 8.0, "original_max_seq_len": 32},
        ]
    )
    fractions = [part for part in (1.0, 0.75, 0.5, 0.25) if int(head_dim * part) and int(head_dim * part) % 2 == 0]
    fraction, found = draw(st.sampled_from(fractions)), draw(maybe(scaling))
    if found is not None and found["kind"] == "longrope":
        found = {**found, "pair_factors": [1.0 + pair for pair in range(int(head_dim * fraction) // 2)]}
    return {"rotary_fraction": fraction, "rotary_scaling": found}


@st.composite
def expert_keys(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    count = draw(st.integers(2, 5))
    return {
        "count": count,
        "per_token": draw(st.integers(1, count)),
        "d_ff": draw(maybe(st.sampled_from([3, 8]))),
        "shared": draw(st.integers(0, 2)),
        "layers": draw(maybe(layers(num_layers))),
        "scores": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": draw(st.booleans()),
    }


def layers(num_layers: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers, unique=True)


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a network that can be built, every axis drawn on its own."""
    num_layers, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    encoding = draw(st.sampled_from(get_args(PositionEncoding)))
    head_dim = draw(st.sampled_from([2, 4, 6, 8] if encoding == "rope" else [1, 3, 4]))
    norm, position = draw(st.sampled_from(get_args(NormKind))), draw(st.sampled_from(get_args(NormPosition)))
    soft_cap, window = draw(maybe(st.just(2.0))), draw(maybe(st.integers(1, 6)))
    initialization = draw(st.sampled_from(get_args(Initialization)))
    keys: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": draw(st.sampled_from([8, 10, 16])),
        "num_layers": num_layers,
        "num_heads": num_kv_heads * draw(st.integers(1, 3)),
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
        "qk_norm": draw(maybe(st.sampled_from(["head", "width"]))),
        "short_convolution": draw(maybe(st.integers(2, 4))),
        "ngrams": draw(maybe(st.sampled_from([{"rows": 7}, {"orders": [2, 4], "rows": 50}]))),
        "activation": draw(st.sampled_from(list(ACTIVATION_NAMES))),
        "feed_forward_bias": draw(maybe(st.booleans())),
        "experts": draw(maybe(expert_keys(num_layers))),
        "parallel_residual": draw(st.booleans()) if position != "post" else False,
        "attention_bias": draw(maybe(st.booleans())),
        "attention_output_bias": draw(maybe(st.booleans())),
        "attention_soft_cap": soft_cap,
        "attention_sinks": draw(st.booleans()),
        "sliding_window": window,
        "sliding_layers": draw(maybe(layers(num_layers))) if window else None,
        "attention_backend": draw(st.sampled_from(["auto", "eager"] + ["sdpa"] * (soft_cap is None))),
        "bias": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "tie_weights": draw(st.booleans()),
        "logit_soft_cap": draw(maybe(st.just(3.0))),
        "initialization": initialization,
    }
    if encoding in ("rope", "sinusoidal"):
        keys["position_base"] = draw(st.sampled_from([50.0, 10000.0]))
    if encoding == "rope":
        keys |= draw(rotary_keys(head_dim))
        keys["sliding_position_base"] = draw(maybe(st.just(20.0))) if window else None
    if initialization == "mup":
        keys["mup_base_d_model"] = draw(st.sampled_from([4, 8, 32]))
        keys["mup_base_head_dim"] = draw(maybe(st.just(2)))
    if keys.get("mup_base_head_dim") is None:
        keys["attention_scale"] = draw(maybe(st.just(0.3)))
    return keys


def check_training(model: Transformer) -> None:
    """Whole rows and packed ones, in float32: a finite loss, and a finite gradient in every parameter.

    Experts that no token chose share their tensor with those that were chosen; theirs is a zero there.
    """
    for arguments in ({}, {"document_ids": DOCUMENTS}):
        model.train().zero_grad()
        loss = cross_entropy(model(IDS, **arguments), IDS.roll(-1, 1))
        loss.backward()
        assert torch.isfinite(loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad.to_dense()).all(), name


def check_generation(model: Transformer) -> None:
    """Contexts of seven and of four tokens, and three tokens more: with the cache as without."""
    texts = [IDS[0], torch.cat((IDS[1, :4], IDS[1, 7:]))]
    with torch.inference_mode():
        found = read_in_pieces(model, texts, ([7, 4], [1, 1], [1, 1], [1, 1]))
        for text, states in zip(texts, found, strict=True):
            torch.testing.assert_close(states, model.hidden_states(text[None])[0], atol=1e-9, rtol=0)


def check_causality(model: Transformer) -> None:
    """Later tokens change no earlier logit, and a document's logits are those of the document alone."""
    with torch.inference_mode():
        before, packed = model(IDS), model(IDS, document_ids=DOCUMENTS, positions=positions())
        for cut in (1, 4, 9):
            changed = torch.cat((IDS[:, :cut], (IDS[:, cut:] + 3) % VOCAB), dim=1)
            torch.testing.assert_close(model(changed)[:, :cut], before[:, :cut], atol=1e-9, rtol=0)
        for row, starts in enumerate(STARTS):
            for start, end in itertools.pairwise(starts):
                alone = model(IDS[row, start:end][None])[0]
                torch.testing.assert_close(packed[row, start:end], alone, atol=1e-9, rtol=0)


def positions() -> Tensor:
    rows = [[t - max(start for start in starts if start <= t) for t in range(LENGTH)] for starts in STARTS]
    return torch.tensor(rows)


def check_works(config: ModelConfig) -> None:
    model = build_model(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    check_training(model)
    # In float64 no rounding can send a token to another expert.
    model.double().eval()
    check_generation(model)
    check_causality(model)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(keys=valid_settings())
def test_every_valid_configuration_trains_generates_and_is_causal(keys: dict[str, Any]) -> None:
    check_works(validate(ModelConfig, keys))


JUNK = (None, 0, 1, -1, 3, 1.5, 0.0, -0.5, True, False, "", "x", [], [0], [0, 0], [7], {}, 10**400, float("nan"), 1e300)
OTHERS: dict[str, tuple[Any, ...]] = {
    "num_heads": (5, 12),
    "num_kv_heads": (4, 5),
    "head_dim": (3, 5),
    "position_encoding": get_args(PositionEncoding),
    "position_base": (100.0,),
    "rotary_fraction": (0.1, 0.9),
    "rotary_scaling": (
        {"kind": "yarn", "factor": 2},
        {"kind": "linear", "factor": 2, "beta_fast": 3},
        {"kind": "llama3", "factor": 2, "original_max_seq_len": 9, "low_freq_factor": 5},
        {"kind": ["ntk"], "factor": 2},
        {"kind": "ntk"},
        {"kind": "longrope", "factor": 2, "original_max_seq_len": 9, "pair_factors": [1.0]},
        {"kind": "longrope", "factor": 2, "original_max_seq_len": 1, "pair_factors": [1.0, 2.0, 3.0, 4.0]},
    ),
    "sliding_layers": ([0], [9], [0, 0]),
    "sliding_position_base": (50.0, 1.0),
    "experts": ({"count": 2, "per_token": 3}, {"count": 3, "layers": [8]}, {"count": 1}, {"number": 3}),
    "norm": get_args(NormKind),
    "norm_position": get_args(NormPosition),
    "activation": (*ACTIVATION_NAMES, ["gelu"]),
    "parallel_residual": (True,),
    "attention_backend": ("sdpa", "flex", "flash"),
    "attention_soft_cap": (0.5,),
    "initialization": get_args(Initialization),
    "mup_base_head_dim": (4,),
    "attention_scale": (0.2,),
    "num_encoder_layers": (2,),
    "preset": ("gpt5", ["gpt2"]),
}
UNTOUCHED = {"architecture", "vocab_size"}
KEYS = [name for name in ModelConfig.model_fields if name not in UNTOUCHED]


@st.composite
def changed_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid keys of which one to three are given another value, of the right kind or of none."""
    keys = draw(valid_settings())
    for name in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)):
        keys[name] = draw(st.sampled_from(OTHERS.get(name, ()) + JUNK))
    return keys


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(keys=changed_settings())
@example({"activation": ["gelu"]})
@example({"d_model": 10**400})
def test_any_other_configuration_is_refused_in_words(keys: dict[str, Any]) -> None:
    try:
        config = validate(ModelConfig, keys)
    except ConfigError as error:
        message = str(error)
        note(message)
        assert any(name in message for name in keys)
        assert len(message.split()) > 3
        return
    if config.attention_backend == "flex":
        with pytest.raises(ConfigError, match="flex needs an NVIDIA GPU"):
            build_model(config, 0).eval()(IDS)
    elif _small(config) and not _extreme(config):
        check_works(config)


def _small(config: ModelConfig) -> bool:
    return config.max_seq_len >= LENGTH and config.vocabulary == VOCAB


def _extreme(config: ModelConfig) -> bool:
    """Whether a number is allowed that drowns or explodes what float32 can hold."""
    numbers = (config.embedding_scale, config.norm_eps, config.attention_scale, config.initial_std)
    return any(number is not None and not 1e-6 <= number <= 1e3 for number in numbers)
