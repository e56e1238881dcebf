"""Initial weights: their statistics, what they depend on, tied weights, and dropout."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch

from sheepop.core.random import seed_torch
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy
from sheepop.model.options import Initialization


def config(**settings: Any) -> ModelConfig:
    sizes = {"vocab_size": 512, "d_model": 128, "num_layers": 2, "num_heads": 4, "max_seq_len": 128}
    return ModelConfig(**{**sizes, **settings})


def assert_normal(parameter: torch.Tensor, std: float) -> None:
    """Mean 0 and the given deviation within five standard errors, and the kurtosis 3 of a normal distribution."""
    count = parameter.numel()
    assert abs(parameter.mean().item()) < 5 * std / math.sqrt(count)
    assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count))
    assert (parameter / std).pow(4).mean().item() == pytest.approx(3.0, abs=5 * math.sqrt(96 / count))


@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "rope"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_deviation_of_every_kind_of_weight(encoding, activation):
    settings = config(num_layers=3, position_encoding=encoding, activation=activation, tie_weights=False)
    parameters = dict(build_model(settings, seed=11).named_parameters())
    residual = 0.02 / math.sqrt(2 * 3)
    checked = set()
    for name, parameter in parameters.items():
        if name.endswith(".bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert_normal(parameter.detach(), residual)
        elif name == "embedding.weight":
            assert_normal(parameter.detach(), 1 / math.sqrt(128) if encoding == "sinusoidal" else 0.02)
        else:
            assert_normal(parameter.detach(), 0.02)
            checked.add(name.removesuffix(".weight").rsplit(".", 1)[-1])
    gate = {"gate_proj"} if activation == "swiglu" else set()
    table = {"table"} if encoding == "learned" else set()
    assert checked == {"q_proj", "k_proj", "v_proj", "up_proj", "lm_head"} | gate | table


def assert_uniform(parameter: torch.Tensor, bound: float) -> None:
    """Within the bound and close to it; mean 0, and the variance bound^2 / 3 of a uniform distribution."""
    count = parameter.numel()
    assert parameter.abs().max() <= bound
    assert parameter.abs().max() > bound * (1 - 10 / count)
    assert abs(parameter.mean().item()) < 5 * bound / math.sqrt(3 * count)
    assert parameter.square().mean().item() == pytest.approx(bound**2 / 3, rel=5 / math.sqrt(count))


ALL_KINDS: dict[str, Any] = {
    "d_model": 64,
    "num_layers": 2,
    "num_kv_heads": 2,
    "d_ff": 96,
    "value_head_dim": 24,
    "max_seq_len": 64,
    "position_encoding": "learned",
    "activation": "swiglu",
    "norm_position": "sandwich",
    "qk_norm": "own_head",
    "embedding_norm": True,
    "attention_sinks": True,
    "tie_weights": False,
    "initial_std": 0.03,
    "experts": {"count": 8, "d_ff": 48, "shared": 1, "layers": [1]},
}
# Inputs and outputs of every matrix of that network.
FANS = {
    "q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 48), "attention.o_proj": (96, 64),
    "blocks.0.feed_forward.gate_proj": (64, 96), "blocks.0.feed_forward.up_proj": (64, 96),
    "blocks.0.feed_forward.down_proj": (96, 64), "shared.gate_proj": (64, 48), "shared.up_proj": (64, 48),
    "shared.down_proj": (48, 64), "experts.gate_proj": (64, 48), "experts.up_proj": (64, 48),
    "experts.down_proj": (48, 64), "router": (64, 8), "lm_head": (64, 512),
}  # fmt: skip


def expected_deviation(scheme: str, owner: str) -> float:
    """Of a matrix under a scheme; for the uniform ones the bound. muP is four times as wide as its base of 16."""
    (inputs, outputs) = FANS[owner]
    branch = 0.5 if owner.endswith(("o_proj", "down_proj")) else 1.0
    of_mup = {"lm_head": 1.0, "router": 1 / 4}.get(owner, 1 / 2)
    return {
        "normal": 0.03,
        "gpt2": 0.03 * branch,
        "xavier_normal": math.sqrt(2 / (inputs + outputs)),
        "xavier_uniform": math.sqrt(6 / (inputs + outputs)),
        "fan_in_normal": 1 / math.sqrt(inputs),
        "fan_in_uniform": 1 / math.sqrt(inputs),
        "he": math.sqrt(2 / inputs),
        "mup": 0.03 * branch * of_mup,
    }[scheme]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm_zero_centered"])
@pytest.mark.parametrize("scheme", get_args(Initialization))
def test_every_kind_of_weight_begins_as_its_scheme_says(scheme, norm):
    keys = {"mup_base_d_model": 16} if scheme == "mup" else {}
    parameters = dict(build_model(config(**ALL_KINDS, norm=norm, initialization=scheme, **keys), 3).named_parameters())
    met = set()
    for name, parameter in parameters.items():
        owner = next((part for part in FANS if name.removesuffix(".weight").endswith(part)), None)
        if name.endswith(("bias", "sinks")):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == (1.0 if norm == "layernorm" else 0.0)).all(), name
        elif owner is None:
            assert name in ("embedding.weight", "added_positions.table")
            assert_normal(parameter.detach(), 0.03)
        else:
            met.add(owner)
            assert parameter.shape[-2:] == FANS[owner][::-1]
            if scheme.endswith("uniform"):
                assert_uniform(parameter.detach(), expected_deviation(scheme, owner))
            else:
                assert_normal(parameter.detach(), expected_deviation(scheme, owner))
    assert met == FANS.keys()


@pytest.mark.parametrize("scheme", get_args(Initialization))
def test_the_deviation_of_an_expert_is_that_of_a_feed_forward_network_of_its_size(scheme):
    """A stack of matrices is E matrices, and not one with E times the outputs."""
    keys = {"mup_base_d_model": 32} if scheme == "mup" else {}
    sizes = {"activation": "swiglu", "d_ff": 96, "initialization": scheme, **keys}
    stacked = build_model(config(experts={"count": 4}, **sizes), 0).blocks[0].feed_forward.experts
    single = build_model(config(**sizes), 0).blocks[0].feed_forward
    for part in ("gate_proj", "up_proj", "down_proj"):
        one = getattr(single, part).weight.std().item()
        for matrix in getattr(stacked, part):
            assert matrix.std().item() == pytest.approx(one, rel=0.05)


def test_embedded_tokens_and_sinusoids_have_like_size():
    model = build_model(config(), seed=0)
    tokens = model.embedding.weight * model.embedding_scale
    assert tokens.pow(2).mean().sqrt().item() == pytest.approx(1.0, rel=0.02)
    assert model.added_positions.table.pow(2).mean().sqrt().item() == pytest.approx(math.sqrt(0.5), rel=1e-3)


def test_a_value_depends_on_seed_and_name_only():
    shallow = dict(build_model(config(num_layers=2), seed=4).named_parameters())
    deep = dict(build_model(config(num_layers=5), seed=4).named_parameters())
    for name, parameter in shallow.items():
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        # Residual scaling is the only thing that the depth changes: by sqrt(2 * 5) / sqrt(2 * 2).
        expected = deep[name] * math.sqrt(5 / 2) if ends_branch else deep[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-6 if ends_branch else 0, atol=0)


def test_building_neither_reads_nor_depends_on_the_global_generator():
    torch.manual_seed(1)
    first = build_model(config(), seed=4).state_dict()
    torch.manual_seed(2)
    second = build_model(config(), seed=4).state_dict()
    other = build_model(config(), seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_no_two_parameters_start_with_the_same_values():
    matrices = [p for p in build_model(config(), seed=0).parameters() if p.ndim == 2]
    starts = {tuple((matrix.flatten()[:8] / matrix.std()).tolist()) for matrix in matrices}
    assert len(starts) == len(matrices)


def test_tied_weights_share_storage_and_gradient():
    model = build_model(config(dropout=0.0), seed=0)
    assert model.lm_head.weight is model.embedding.weight
    untied = build_model(config(dropout=0.0, tie_weights=False), seed=0)
    assert untied.lm_head.weight is not untied.embedding.weight
    untied.load_state_dict(model.state_dict())
    ids, labels = torch.randint(0, 512, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    for network in (model, untied):
        cross_entropy(network(ids), labels).backward()
    # One parameter with two uses has the sum of both gradients.
    both = untied.lm_head.weight.grad + untied.embedding.weight.grad
    torch.testing.assert_close(model.embedding.weight.grad, both, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float64])
def test_tied_weights_stay_tied_when_the_network_is_moved(target):
    model = build_model(config(), seed=0).to(target)
    assert model.lm_head.weight is model.embedding.weight
    assert model.lm_head.weight.dtype == target


def test_a_network_on_the_meta_device_takes_weights_and_computes():
    built = build_model(config(dropout=0.0), seed=0).eval()
    with torch.device("meta"):
        laid_out = Transformer(built.config)
    assert all(parameter.is_meta for parameter in laid_out.parameters())
    laid_out.load_state_dict(built.state_dict(), assign=True)
    laid_out.tie()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(laid_out.eval()(ids), built(ids))
    assert laid_out.lm_head.weight is laid_out.embedding.weight


def test_laying_out_a_network_loads_no_compiler():
    """It takes more than a second, which everyone would wait for who lets a model write."""
    lines = (
        "import sys, torch",
        "from sheepop.model import ModelConfig, blank_model",
        "torch.set_default_device('meta')",
        "blank_model(ModelConfig(vocab_size=32, d_model=16, num_layers=1, num_heads=1))",
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dropout_acts_in_training_only_and_repeats_with_its_seed():
    model = build_model(config(dropout=0.3), seed=0)
    without = build_model(config(dropout=0.0), seed=0)
    ids = torch.tensor([[1, 2, 3, 4]])

    def train_pass(step: int) -> torch.Tensor:
        seed_torch(7, "dropout", step)
        return model.train()(ids)

    assert torch.equal(train_pass(0), train_pass(0))
    assert not torch.equal(train_pass(0), train_pass(1))
    assert not torch.equal(train_pass(0), without(ids))
    assert torch.equal(model.eval()(ids), without(ids))


@pytest.mark.parametrize(
    "settings",
    [
        {"position_encoding": "sinusoidal"},
        {"position_encoding": "learned", "norm_position": "post", "parallel_residual": False},
        {"position_encoding": "rope", "sliding_window": 3, "sliding_layers": [1], "sliding_position_base": 100.0},
        {"position_encoding": "alibi", "value_head_dim": 8},
        {"position_encoding": "none", "attention_soft_cap": 2.0, "logit_soft_cap": 5.0, "qk_norm": "head"},
        {"attention_sinks": True, "parallel_residual": True},
    ],
    ids=str,
)
def test_compiled_as_one_graph_gives_the_same_logits(settings: dict[str, Any]) -> None:
    model = build_model(config(num_kv_heads=2, dropout=0.0, **settings), seed=0)
    # What was compiled before counts towards a limit.
    torch.compiler.reset()
    # The backend "eager" captures the graph and needs no compiler; fullgraph refuses any break in it.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    for arguments in ({}, {"positions": positions, "document_ids": documents}):
        torch.testing.assert_close(compiled(ids, **arguments), model(ids, **arguments), atol=1e-5, rtol=0)


def test_each_stack_of_an_encoder_decoder_is_scaled_by_its_own_branches() -> None:
    """Two branches in each of 2 encoder layers and three in each of 3 decoder layers: a root of 4, and one of 9."""
    sizes = {"vocab_size": 8, "d_model": 128, "num_heads": 2, "num_layers": 3, "num_encoder_layers": 2}
    config = ModelConfig(architecture="encoder_decoder", initialization="gpt2", **sizes)
    model = build_model(config, 0)
    for name, root in (("encoder_blocks.1.attention", 2), ("blocks.2.attention", 3), ("blocks.2.cross_attention", 3)):
        std = model.get_parameter(f"{name}.o_proj.weight").std().item()
        assert std == pytest.approx(config.initial_std / root, rel=0.05), name
