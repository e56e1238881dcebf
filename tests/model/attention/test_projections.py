"""Queries, keys and values by one product of packed weights, against three products."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.attention.layer import Attention
from sheepop.model.attention.projections import PackedProjections


def network(**settings: object) -> Transformer:
    base = {"vocab_size": 19, "d_model": 12, "num_layers": 2, "num_heads": 4, "head_dim": 4, "max_seq_len": 8}
    return build_model(ModelConfig(**{**base, "dropout": 0.0, **settings}), seed=0).double()


def attention(model: Transformer) -> Attention:
    return model.layers[0].attention


class Calls(TorchDispatchMode):
    """Counts products of matrices."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def is_packed(layer: Attention) -> bool:
    return layer._packed is not None and layer._packed.holds((layer.q_proj, layer.k_proj, layer.v_proj))


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "value_head_dim": 5, "qk_norm": "head"}],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_values_gradients_and_steps_are_those_of_three_products(settings, compiled) -> None:
    model = network(**settings)
    packed = copy.deepcopy(model)
    packed.pack_projections()
    run = torch.compile(packed, backend="aot_eager") if compiled else packed
    ids = torch.arange(14).view(2, 7)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, packed)]
    for _ in range(2):
        assert is_packed(attention(packed))
        results = [one(ids).square().mean() for one in (model, run)]
        torch.testing.assert_close(results[1], results[0], atol=1e-13, rtol=0)
        for result, optimizer in zip(results, optimizers, strict=True):
            optimizer.zero_grad()
            result.backward()
            optimizer.step()
        for one, other in zip(model.parameters(), packed.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, atol=1e-13, rtol=0)
            torch.testing.assert_close(other, one, atol=1e-13, rtol=0)
    torch.compiler.reset()


def test_one_product_takes_the_place_of_three() -> None:
    model = network()
    products = []
    for _ in range(2):
        with torch.utils._python_dispatch._disable_current_modes(), torch.profiler.profile() as profile:
            model(torch.zeros(1, 4, dtype=torch.long))
        products.append(
            sum(event.count for event in profile.key_averages() if event.key in ("aten::addmm", "aten::mm"))
        )
        model.pack_projections()
    assert products[0] - products[1] == 2 * 2


def test_loading_keeps_it_and_the_state_is_that_of_three_layers() -> None:
    model, other = network(), network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    names = list(model.state_dict())
    model.pack_projections()
    assert list(model.state_dict()) == names
    model.load_state_dict(other.state_dict())
    assert is_packed(attention(model))
    ids = torch.arange(7)[None]
    torch.testing.assert_close(model(ids), other(ids), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    "apart",
    [
        lambda model: model.float(),
        lambda model: model.load_state_dict(network().state_dict(), assign=True),
        lambda model: setattr(attention(model).k_proj.weight, "data", attention(model).k_proj.weight.data.clone()),
        lambda model: setattr(attention(model), "v_proj", nn.Sequential(attention(model).v_proj)),
        lambda model: attention(model).q_proj.register_forward_hook(lambda *_: None),
    ],
    ids=["other type", "assigned", "other memory", "other layer", "hook"],
)
def test_what_sets_the_weights_apart_makes_three_products_again(apart) -> None:
    model = network()
    expected = model(torch.arange(7)[None])
    model.pack_projections()
    apart(model)
    assert not is_packed(attention(model))
    torch.testing.assert_close(model(torch.arange(7)[None]).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"bias": False}], ids=str)
def test_packing_a_copy_that_shares_the_weights_leaves_both_with_the_same_memory(settings) -> None:
    """Else the first one, where it is compiled, would go on with weights that no optimizer moves any more."""
    model = network(**settings)
    model.pack_projections()
    shared = model.sharing_copy()
    shared.pack_projections()
    assert is_packed(attention(model))
    assert is_packed(attention(shared))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    ids = torch.arange(7)[None]
    assert torch.equal(shared(ids), model(ids))
    apart = copy.deepcopy(model)
    torch.testing.assert_close(apart(ids), model(ids), atol=1e-13, rtol=0)


def test_a_copy_is_not_packed_and_other_layers_are_refused() -> None:
    model = network()
    model.pack_projections()
    assert not is_packed(attention(copy.deepcopy(model)))
    assert PackedProjections.of((nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))) is None
    assert PackedProjections.of((nn.Linear(2, 2), nn.Linear(2, 2, bias=False))) is None
