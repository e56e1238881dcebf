"""Initial weights: their statistics, what they depend on, tied weights, and dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sheepop.core.random import seed_torch
from sheepop.model import ModelConfig, Transformer, build_model, cross_entropy


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


def test_compiled_as_one_graph_gives_the_same_logits():
    for encoding in ("sinusoidal", "learned", "rope"):
        model = build_model(config(position_encoding=encoding, num_kv_heads=2, dropout=0.0), seed=0)
        # The backend "eager" captures the graph and needs no compiler; fullgraph refuses any break in it.
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        ids = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(0))
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
        for arguments in ({}, {"positions": positions, "document_ids": documents}):
            assert torch.equal(compiled(ids, **arguments), model(ids, **arguments))
