"""Maximal-update parametrisation: the table of Yang et al. 2022, by hand for a network four times its base's width."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, build_model
from sheepop.model.initialization import parameter_role
from sheepop.model.mup import learning_rate_multiplier


def config(**settings: Any) -> ModelConfig:
    sizes = {"vocab_size": 64, "d_model": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 16, "dropout": 0.0}
    return ModelConfig(**{**sizes, "initialization": "mup", "mup_base_d_model": 16, **settings})


ALL_KINDS: dict[str, Any] = {
    "position_encoding": "learned",
    "activation": "swiglu",
    "tie_weights": False,
    "experts": {"count": 4, "shared": 1},
    "qk_norm": "own_head",
}
ROLES = {
    "embedding.weight": "embedding",
    "added_positions.table": "embedding",
    "lm_head.weight": "head",
    "final_norm.weight": "vector",
    "final_norm.bias": "vector",
    "blocks.0.attention_norm.weight": "vector",
    "blocks.0.attention.q_proj.weight": "matrix",
    "blocks.0.attention.q_proj.bias": "vector",
    "blocks.1.attention.o_proj.weight": "matrix",
    "blocks.0.feed_forward.router.weight": "router",
    "blocks.0.feed_forward.experts.gate_proj": "matrix",
    "blocks.0.feed_forward.experts.down_proj": "matrix",
    "blocks.0.feed_forward.experts.up_bias": "vector",
    "blocks.0.attention.q_norm.weight": "vector",
    "blocks.0.feed_forward.experts.down_bias": "vector",
    "blocks.0.feed_forward.shared.down_proj.weight": "matrix",
    "blocks.0.feed_forward.shared.down_proj.bias": "vector",
}
# By role, for n = 4.
BY_HAND = {
    "adaptive": {"vector": 1, "embedding": 1, "head": 1, "matrix": 1 / 4, "router": 1 / 4},
    "gradient": {"vector": 4, "embedding": 4, "head": 4, "matrix": 1, "router": 1 / 4},
    "relative": {"vector": 1, "embedding": 1, "head": 1, "matrix": 1 / 2, "router": 1},
    "orthogonal": {"matrix": 1 / 2, "router": 1 / 4},
}


@pytest.mark.parametrize("update", BY_HAND)
def test_learning_rates_are_multiplied_by_the_powers_of_the_table(update: str) -> None:
    parameters = dict(build_model(config(**ALL_KINDS), 0).named_parameters())
    assert parameters.keys() > ROLES.keys()
    for name, role in ROLES.items():
        shape = parameters[name].shape
        assert parameter_role(name, shape) == role, name
        if role in BY_HAND[update]:
            found = learning_rate_multiplier(name, shape, config(**ALL_KINDS), update)
            assert found == pytest.approx(BY_HAND[update][role]), name


def test_other_networks_keep_their_rates() -> None:
    plain = ModelConfig(vocab_size=8)
    for update in BY_HAND:
        assert learning_rate_multiplier("blocks.0.attention.q_proj.weight", (256, 256), plain, update) == 1.0


@pytest.mark.parametrize(
    ("name", "shape", "update", "settings"),
    [
        ("final_norm.weight", (64,), "orthogonal", {}),
        ("blocks.0.attention.sinks", (4,), "gradient", {"attention_sinks": True}),
        ("blocks.1.attention.k_norm.weight", (16,), "gradient", {"qk_norm": "head"}),
    ],
)
def test_a_parameter_without_a_rule_is_refused(name: str, shape: tuple[int], update: Any, settings: Any) -> None:
    with pytest.raises(ConfigError, match=rf"mup has no rule for {name} with updates of the kind {update}"):
        learning_rate_multiplier(name, shape, config(**settings), update)


def test_the_base_network_is_the_ordinary_one() -> None:
    """At its own width muP changes nothing, neither weights nor logits nor rates."""
    base = build_model(config(mup_base_d_model=64, mup_base_head_dim=16), 5).eval()
    plain = build_model(config(initialization="gpt2", mup_base_d_model=None), 5).eval()
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(base(ids), plain(ids))


def test_initial_logits_and_token_vectors_are_those_of_the_base_at_every_width() -> None:
    """The head has no smaller weights and a multiplier 1/n: its logits fall with the root of the width."""
    sizes, deviations = [], []
    ids = torch.arange(64).view(4, 16)
    for width in (64, 256, 1024):
        model = build_model(config(d_model=width, mup_base_d_model=64, tie_weights=False, num_layers=1), 1).eval()
        with torch.no_grad():
            sizes.append((model.embedding.weight * model.embedding_scale).square().mean().sqrt().item())
            deviations.append(model(ids).std().item())
    assert sizes == pytest.approx([1.0] * 3, rel=0.05)
    assert [deviation / deviations[0] for deviation in deviations] == pytest.approx([1, 1 / 2, 1 / 4], rel=0.1)


def test_scores_are_divided_by_the_head_and_not_by_its_root() -> None:
    """At the base's head of 4 columns both are the same, 1 / 2; four times as wide they are 1 / 8, and not 1 / 4."""
    assert config(mup_base_head_dim=4, head_dim=4).score_scale == pytest.approx(1 / 2)
    assert config(mup_base_head_dim=4, head_dim=16).score_scale == pytest.approx(1 / 8)
    assert config(head_dim=16).score_scale is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mup_base_d_model": None}, "initialization: mup and mup_base_d_model must be set together"),
        ({"initialization": "gpt2"}, "initialization: mup and mup_base_d_model must be set together"),
        ({"mup_base_head_dim": 4, "attention_scale": 0.5}, "attention_scale and mup_base_head_dim both set"),
        (
            {"initialization": "gpt2", "mup_base_d_model": None, "mup_base_head_dim": 4},
            "mup_base_head_dim applies to initialization: mup",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(ModelConfig, {"vocab_size": 8, "initialization": "mup", "mup_base_d_model": 16, **settings})
