"""The whole network against a second one in slow float64 NumPy: every axis, and every way to run it."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy

from ..reading import read_in_pieces
from .slow_network import SlowNetwork

VOCAB, LENGTH = 23, 9
# Three documents in the first row; the second begins within one, and an id comes again.
DOCUMENTS = [[0, 0, 0, 0, 0, 1, 1, 2, 2], [4, 4, 1, 1, 1, 1, 1, 4, 4]]


def network(**settings: Any) -> Transformer:
    """A toy network in float64 whose every weight is drawn: no bias 0, no norm 1, no sink and no balance even."""
    sizes = {"vocab_size": VOCAB, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 12, "max_seq_len": 16}
    model = build_model(ModelConfig(**{**sizes, "dropout": 0.0, **settings}), seed=3).double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            tensor.copy_(centre + (1.0 if name.endswith("sinks") else 0.4) * noise)
    model.tie()
    return model


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def positions_within(documents: list[list[int]]) -> Tensor:
    rows = []
    for row in documents:
        positions = [0]
        for before, now in itertools.pairwise(row):
            positions.append(positions[-1] + 1 if before == now else 0)
        rows.append(positions)
    return torch.tensor(rows)


ROPE = {"position_encoding": "rope"}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16, "beta_fast": 2.0, "beta_slow": 0.5}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_max_seq_len": 16, "low_freq_factor": 1.0, "high_freq_factor": 2.5}
LONGROPE = {"kind": "longrope", "factor": 8.0, "original_max_seq_len": 16, "pair_factors": [1.0, 1.5, 2.5, 7.0]}
FAST = {**ROPE, "position_base": 20.0, "head_dim": 8}
MUP = {"initialization": "mup", "mup_base_d_model": 4}
EXPERTS = {"count": 5, "per_token": 2}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}
GEMMA4: dict[str, Any] = {
    **ROPE,
    "norm": "rmsnorm",
    "norm_position": "sandwich",
    "activation": "geglu_tanh",
    "bias": False,
    "num_layers": 6,
    "head_dim": 8,
    "num_kv_heads": 1,
    "qk_norm": "head",
    "value_norm": True,
    "attention_scale": 0.3,
    "rotary_scaling": {"kind": "proportional", "factor": 1.0, "fraction": 0.5},
    "sliding_window": 3,
    "sliding_layers": [0, 2, 4],
    "sliding_head_dim": 4,
    "sliding_num_kv_heads": 2,
    "sliding_position_base": 50.0,
    "keys_as_values": [1],
    "shared_kv_layers": 3,
    "layer_d_ff": [12, 12, 12, 24, 24, 24],
    "layer_inputs": {"width": 3},
    "layer_factor": True,
    "logit_soft_cap": 3.0,
    "experts": {
        **EXPERTS,
        "layers": [1, 4],
        "shared": 3,
        "own_norms": True,
        "expert_scales": True,
        "router_scale": 0.25,
        "d_ff": 4,
    },
}
AXES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "sinusoidal, another base": {"position_base": 50.0, "embedding_scale": 1.0},
    "learned": {"position_encoding": "learned"},
    "no positions": {"position_encoding": "none"},
    "rope": ROPE,
    "rope, partial": {**FAST, "rotary_fraction": 0.5},
    "rope, a single pair": {**FAST, "rotary_fraction": 0.25},
    "rope, linear": {**FAST, "rotary_scaling": {"kind": "linear", "factor": 3.0}},
    "rope, ntk": {**FAST, "rotary_scaling": {"kind": "ntk", "factor": 3.0}},
    "rope, yarn": {**FAST, "rotary_scaling": YARN},
    "rope, yarn, partial, own factor": {
        **FAST,
        "rotary_fraction": 0.75,
        "rotary_scaling": {**YARN, "truncate": False, "attention_factor": 1.7},
    },
    "rope, longrope": {**FAST, "rotary_scaling": LONGROPE},
    "rope, llama3": {**FAST, "rotary_scaling": LLAMA3},
    "alibi": {"position_encoding": "alibi"},
    "alibi, six heads": {"position_encoding": "alibi", "num_heads": 6, "head_dim": 4, "num_kv_heads": 3},
    "alibi, eleven heads": {"position_encoding": "alibi", "num_heads": 11, "head_dim": 2},
    "alibi, window, cap": {"position_encoding": "alibi", "sliding_window": 3, "attention_soft_cap": 1.5},
    "rmsnorm": {"norm": "rmsnorm"},
    "rmsnorm, zero-centred": {"norm": "rmsnorm_zero_centered", "norm_eps": 0.5},
    "norm without bias": {"norm_bias": False},
    "post-norm": {"norm_position": "post"},
    "post-norm with a final norm": {"norm_position": "post", "final_norm": True},
    "sandwich": {"norm_position": "sandwich", "norm": "rmsnorm_zero_centered"},
    "output norm": {"norm_position": "output", "norm": "rmsnorm"},
    "no final norm": {"final_norm": False},
    "embedding norm": {"embedding_norm": True, "embedding_scale": 2.5},
    "qk-norm, head": {**ROPE, "qk_norm": "head", "num_kv_heads": 2},
    "qk-norm, width": {**ROPE, "qk_norm": "width", "num_kv_heads": 2, "norm": "rmsnorm"},
    "qk-norm, own head": {**ROPE, "qk_norm": "own_head", "num_kv_heads": 2},
    "qk-norm, own head, rms": {"qk_norm": "own_head", "norm": "rmsnorm", "norm_eps": 0.1},
    "qk-norm, own head, zero-centred": {"qk_norm": "own_head", "norm": "rmsnorm_zero_centered"},
    "qk-norm, zero-centred": {"qk_norm": "head", "norm": "rmsnorm_zero_centered"},
    **{
        f"activation {name}": {"activation": name, "bias": name != "geglu"}
        for name in ("relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh")
    },
    "grouped queries": {"num_kv_heads": 2},
    "one key-value head": {"num_kv_heads": 1, "head_dim": 6},
    "window": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "window in one layer": {"sliding_window": 2, "sliding_layers": [1], "num_layers": 3},
    "window with its own base": {
        **FAST,
        "sliding_window": 4,
        "sliding_layers": [0, 2],
        "num_layers": 3,
        "sliding_position_base": 5.0,
        "rotary_scaling": {"kind": "linear", "factor": 2.0},
    },
    "rope in some layers": {**FAST, "num_layers": 3, "rotary_layers": [0, 2]},
    "rope in the layers without a window": {
        **FAST,
        "sliding_window": 3,
        "sliding_layers": [0, 2],
        "num_layers": 3,
        "rotary_layers": [1, 2],
    },
    "residual scale": {"residual_scale": 0.3, "norm_position": "sandwich"},
    "residual scale, parallel": {"residual_scale": 0.3, "parallel_residual": True},
    "residual scale, post-norm": {"residual_scale": 0.3, "norm_position": "post"},
    "head bias": {"head_bias": True},
    "head bias, scaled and capped": {
        "head_bias": True,
        "logit_scale": 0.5,
        "logit_soft_cap": 2.0,
        "tie_weights": False,
    },
    "latent": {**ROPE, "head_dim": 8, "latent_attention": {"kv_rank": 5, "rope_head_dim": 4, "norm_eps": 0.3}},
    "latent, queries too, in one layer rotated": {
        **FAST,
        "latent_attention": {"kv_rank": 6, "q_rank": 5, "rope_head_dim": 2},
        "value_head_dim": 3,
        "rotary_layers": [1],
        "rotary_scaling": YARN,
        "attention_scale": 0.7,
        "sliding_window": 4,
    },
    "experts in groups": {
        "experts": {"count": 6, "per_token": 3, "groups": 3, "groups_per_token": 2, "scale": 2.5, "normalize": False}
    },
    "experts in groups, by two scores": {
        "experts": {"count": 6, "groups": 2, "group_top": 2, "scale": 2.0, "scores": "sigmoid", "shared": 1}
    },
    "experts, router bias": {"experts": {**EXPERTS, "router_bias": True}},
    "logit scale, capped": {"logit_scale": 2.5, "logit_soft_cap": 1.5},
    "parallel, one norm": {"parallel_residual": True, "shared_norm": True},
    "parallel, one norm, sandwich": {
        "parallel_residual": True,
        "shared_norm": True,
        "norm_position": "sandwich",
        "norm": "rmsnorm",
        "residual_scale": 0.6,
    },
    "soft cap": {"attention_soft_cap": 0.7},
    "sinks": {"attention_sinks": True},
    "sinks, window, grouped": {"attention_sinks": True, "sliding_window": 3, "num_kv_heads": 2},
    "sinks, cap": {"attention_sinks": True, "attention_soft_cap": 2.0},
    "value heads": {"value_head_dim": 7, "num_kv_heads": 2},
    "value heads, sinks, alibi": {"value_head_dim": 3, "attention_sinks": True, "position_encoding": "alibi"},
    "scale": {"attention_scale": 0.9},
    "eager": {"attention_backend": "eager", "sliding_window": 4},
    "sdpa": {"attention_backend": "sdpa", "sliding_window": 4},
    "parallel": {"parallel_residual": True},
    "parallel, sandwich": {"parallel_residual": True, "norm_position": "sandwich", "norm": "rmsnorm"},
    "parallel, output norm": {"parallel_residual": True, "norm_position": "output"},
    "no biases": {"bias": False},
    "qkv biases only": {"bias": False, "attention_bias": True},
    "output bias only": {"bias": False, "attention_output_bias": True},
    "feed-forward biases only": {"bias": False, "feed_forward_bias": True},
    "norm biases only": {"bias": False, "norm_bias": True},
    "untied": {"tie_weights": False},
    "logit soft cap": {"logit_soft_cap": 1.5, "tie_weights": False},
    "experts": {"experts": EXPERTS},
    "experts, not normalised": {"experts": {**EXPERTS, "normalize": False}, "activation": "swiglu"},
    "experts, sigmoid": {"experts": {**EXPERTS, "scores": "sigmoid", "per_token": 3}, "feed_forward_bias": False},
    "experts, sigmoid, not normalised": {"experts": {**EXPERTS, "scores": "sigmoid", "normalize": False}},
    "experts, shared, one layer": {
        "experts": {**EXPERTS, "shared": 2, "layers": [1], "d_ff": 8, "per_token": 1},
        "activation": "geglu",
    },
    "experts, parallel": {"experts": {**EXPERTS, "shared": 1}, "parallel_residual": True, "activation": "swiglu"},
    "mup": MUP,
    "mup, sinusoidal, heads grow": {**MUP, "mup_base_head_dim": 2, "position_encoding": "sinusoidal"},
    "mup, rope, untied, experts": {**MUP, **ROPE, "tie_weights": False, "experts": EXPERTS, "final_norm": False},
    "like gemma 2": {
        **ROPE,
        "norm": "rmsnorm_zero_centered",
        "norm_position": "sandwich",
        "activation": "geglu_tanh",
        "bias": False,
        "num_kv_heads": 2,
        "attention_scale": 0.4,
        "attention_soft_cap": 3.0,
        "logit_soft_cap": 2.0,
        "sliding_window": 3,
        "sliding_layers": [0],
        "embedding_scale": 4.0,
    },
    "rope, proportional": {**FAST, "rotary_scaling": {"kind": "proportional", "factor": 2.0, "fraction": 0.5}},
    "heads of other widths with a window": {
        **FAST,
        "sliding_window": 3,
        "sliding_layers": [0],
        "sliding_head_dim": 6,
        "sliding_num_kv_heads": 4,
        "num_kv_heads": 2,
        "value_head_dim": 5,
        "qk_norm": "own_head",
        "attention_output_gate": True,
    },
    "keys of other layers": {
        **FAST,
        "num_layers": 4,
        "shared_kv_layers": 2,
        "sliding_window": 3,
        "sliding_layers": [1],
    },
    "values from keys": {**FAST, "keys_as_values": [1], "value_norm": True, "num_kv_heads": 2, "qk_norm": "width"},
    "layer inputs": {"layer_inputs": {"width": 3}, "residual_scale": 0.5, "activation": "swiglu"},
    "layer inputs, parallel": {"layer_inputs": {"width": 5}, "parallel_residual": True, "layer_factor": True},
    "widths and factors of layers": {"layer_d_ff": [7, 20], "layer_factor": True, "norm_position": "post"},
    "experts with norms of their own": {
        "experts": {**EXPERTS, "shared": 2, "own_norms": True, "expert_scales": True, "router_scale": 0.3},
        "norm_position": "sandwich",
        "norm": "rmsnorm",
    },
    "experts with a gate beside": {
        "experts": {**EXPERTS, "shared": 1, "shared_gate": True, "router_scale": 0.3, "router_bias": True}
    },
    "gated convolution": {"gated_convolution": {"layers": [0], "bias": True}},
    "delta net": {"gated_delta_net": {**DELTA, "layers": [1]}, "attention_output_gate": True, "norm": "rmsnorm"},
    "like gemma 4": GEMMA4,
    "like gpt-oss": {
        **FAST,
        "norm": "rmsnorm",
        "attention_sinks": True,
        "sliding_window": 3,
        "sliding_layers": [0],
        "num_kv_heads": 2,
        "rotary_scaling": YARN,
        "experts": {**EXPERTS, "router_bias": True},
        "activation": "swiglu_clamped",
        "tie_weights": False,
    },
}


@pytest.fixture(params=AXES, scope="module")
def axis(request: pytest.FixtureRequest) -> tuple[Transformer, list[np.ndarray]]:
    """A network, and the slow network's logits of two rows."""
    model = network(**AXES[request.param])
    return model, [SlowNetwork(model).logits(row) for row in tokens().tolist()]


def test_logits_of_whole_rows(axis) -> None:
    model, expected = axis
    np.testing.assert_allclose(model(tokens()).detach(), np.stack(expected), atol=1e-5)


def test_logits_of_packed_documents(axis) -> None:
    model, _ = axis
    expected = [SlowNetwork(model).logits(row, ids) for row, ids in zip(tokens().tolist(), DOCUMENTS, strict=True)]
    found = model(tokens(), positions=positions_within(DOCUMENTS), document_ids=torch.tensor(DOCUMENTS))
    np.testing.assert_allclose(found.detach(), np.stack(expected), atol=1e-5)


def test_logits_of_rows_of_different_length_through_the_cache(axis) -> None:
    """Rows of nine and of six tokens, read in pieces of other numbers of tokens; each is as the row alone."""
    model, expected = axis
    with torch.inference_mode():
        found = read_in_pieces(model, list(tokens()), ([5, 3], [1, 1], [2, 1], [1, 1]))
        for states, logits, length in zip(found, expected, (9, 6), strict=True):
            np.testing.assert_allclose(model.read_out(states[None])[0], logits[:length], atol=1e-5)


def test_every_axis_changes_the_logits() -> None:
    """No two of the networks are the same, apart from those that are meant to be: a setting does what it says."""
    found = {name: network(**settings)(tokens()).detach() for name, settings in AXES.items()}
    twins = [
        {one, other}
        for one, other in itertools.combinations(found, 2)
        if torch.allclose(found[one], found[other], atol=1e-4, rtol=0)
    ]
    assert twins == [{"sinusoidal", "activation gelu"}, {"eager", "sdpa"}]


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["initial", "large-weights"])
def test_logits_and_loss_equal_the_slow_network(scale: float) -> None:
    """In float32, with the initial weights and with large ones, the architecture of the documents."""
    config = ModelConfig(preset="sheepop-tiny", vocab_size=40, d_model=32, num_layers=3, max_seq_len=16)
    model = build_model(config, seed=2).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter *= scale
            elif parameter.ndim == 1:  # norms and biases too, which start at 1 and 0
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(0, 40, (2, 9), generator=generator)
    labels = torch.randint(0, 40, (2, 9), generator=generator)

    expected = np.stack([SlowNetwork(model).logits(row) for row in ids.tolist()])
    logits = model(ids).detach()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    losses = [
        math.log(sum(math.exp(value) for value in row)) - row[label]
        for row, label in zip(expected.reshape(-1, 40), labels.flatten().tolist(), strict=True)
    ]
    assert cross_entropy(logits, labels).item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
