"""The mixture of experts against a loop over tokens in float64: values, gradients, losses, loads."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.model import ModelConfig, build_model
from sheepop.model.experts import MixtureOfExperts, Routing
from sheepop.model.probe import watch

ACTIVATIONS = {"relu": torch.relu, "swiglu": torch.nn.functional.silu}


def mixture(seed: int = 0, *, dtype: torch.dtype = torch.float64, **settings: Any) -> MixtureOfExperts:
    """Experts with every weight and bias drawn."""
    experts = {"count": 5, "per_token": 2, **settings.pop("experts", {})}
    config = ModelConfig(
        **{"d_model": 8, "num_heads": 1, "d_ff": 12, "dropout": 0.0, "activation": "swiglu", **settings},
        experts=experts,
    )
    assert config.experts is not None
    module = MixtureOfExperts(config, config.experts).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module


def inputs(rows: int = 2, length: int = 7, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen(counts: list[int]) -> Tensor:
    """Choices of which so many fall on each expert."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def loop(module: MixtureOfExperts, x_BTD: Tensor, activation: str = "swiglu") -> tuple[Tensor, list[list[int]]]:
    """Token by token, expert by expert, with autograd; and which experts each token chose."""
    router, experts = module.router, module.experts
    out, chosen = [], []
    for x in x_BTD.flatten(0, 1):
        logits = router.weight @ x
        scores = logits.softmax(0) if router.scores == "softmax" else 1 / (1 + torch.exp(-logits))
        order = sorted(range(len(scores)), key=lambda e: -(scores[e] + router.balance[e]).item())
        best = order[: router.per_token]
        total = sum(scores[e] for e in best) if router.normalize else 1.0
        y = torch.zeros_like(x)
        for e in best:
            up = experts.up_proj[e] @ x + (0 if experts.up_bias is None else experts.up_bias[e])
            if experts.gate_proj is None:
                hidden = ACTIVATIONS[activation](up)
            else:
                gate = experts.gate_proj[e] @ x + (0 if experts.gate_bias is None else experts.gate_bias[e])
                hidden = ACTIVATIONS[activation](gate) * up
            down = experts.down_proj[e] @ hidden + (0 if experts.down_bias is None else experts.down_bias[e])
            y = y + scores[e] / total * down
        out.append(y if module.shared is None else y + module.shared(x))
        chosen.append(best)
    return torch.stack(out).view_as(x_BTD), chosen


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one expert a token": {"experts": {"per_token": 1}},
    "all experts": {"experts": {"per_token": 5}},
    "not gated": {"activation": "relu"},
    "no biases": {"bias": False},
    "sigmoid": {"experts": {"scores": "sigmoid"}},
    "not normalised": {"experts": {"normalize": False}},
    "shared": {"experts": {"shared": 2, "d_ff": 4}},
    "widths of no 16 bytes": {"d_model": 5, "d_ff": 7},
}


@pytest.mark.parametrize("balanced", [False, True], ids=["", "with-balance"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_loop(kind: str, balanced: bool) -> None:
    settings = KINDS[kind]
    module = mixture(**settings)
    if balanced:
        module.router.balance += torch.tensor([0.3, 0.0, -0.2, 0.1, 0.0], dtype=torch.float64)
    x = inputs(width=settings.get("d_model", 8)).requires_grad_()
    expected, _ = loop(module, x, settings.get("activation", "swiglu"))
    found, _ = module(x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weights = inputs(width=x.shape[-1], seed=2)
    of = (x, *module.parameters())
    ours = torch.autograd.grad((found * weights).sum(), of)
    theirs = torch.autograd.grad((expected * weights).sum(), of, allow_unused=True, materialize_grads=True)
    for gradient, by_loop in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, by_loop, atol=1e-11, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("width", [8, 5], ids=["whole-16-bytes", "odd"])
def test_grouped_products_of_training_are_those_of_float64(dtype: torch.dtype, tolerance: float, width: int) -> None:
    """In training precision PyTorch's grouped product computes them where it takes the widths; forward and backward."""
    module = mixture(d_model=width, d_ff=16, dtype=dtype)
    exact = copy.deepcopy(module).double()
    # The choice of experts is discrete: both see the same numbers, those that half precision can hold.
    x = inputs(width=width).to(dtype).double()
    found, expected = module(x.to(dtype))[0], exact(x)[0]
    assert (found.double() - expected).norm() < tolerance * expected.norm()
    found.double().square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() <= 3 * tolerance * (theirs.grad.norm() + 1e-2), name


@settings(max_examples=30)
@given(tokens=st.integers(1, 30), count=st.integers(2, 6), per_token=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_no_token_is_dropped_and_loads_are_counted(tokens: int, count: int, per_token: int, seed: int) -> None:
    per_token = min(count, per_token)
    module = mixture(seed, experts={"count": count, "per_token": per_token}, dtype=torch.float32).train()
    x = inputs(1, tokens, seed=seed).float()
    found, routing = module(x)
    exact = module.double()
    _, chosen = loop(exact, x.double())
    flat = list(itertools.chain(*chosen))
    assert routing.counts.tolist() == [flat.count(e) for e in range(count)]
    assert routing.counts.sum() == tokens * per_token
    torch.testing.assert_close(found.double(), loop(exact, x.double())[0], atol=1e-4, rtol=1e-4)


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    module = mixture(experts={"per_token": 1}, dtype=torch.float32)
    with torch.no_grad():
        module.router.balance += torch.tensor([0.0, 9.0, 0.0, 9.5, 0.0])
        module.router.weight.zero_()
        module.router.weight[1] = 0.1
    module(inputs().float())[0].square().sum().backward()
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        assert [bool(of_expert.any()) for of_expert in parameter.grad] == [False, False, False, True, False]


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several_threads")
def test_gradients_are_repeatable_on_several_threads() -> None:
    """Without deterministic algorithms too; and those of the biases, which many rows share, are those of a loop."""
    module = mixture(dtype=torch.float32).experts
    x, counts = inputs(4, 512).flatten(0, 1).float(), torch.tensor([1100, 500, 0, 400, 48])

    def gradients() -> dict[str, Tensor]:
        module.zero_grad()
        module(x, counts).square().sum().backward()
        return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}

    first = gradients()
    assert all(torch.equal(gradient, first[name]) for _ in range(20) for name, gradient in gradients().items())
    found = copy.deepcopy(module).double()(x.double(), counts).detach()
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for expert, row in zip(torch.arange(5).repeat_interleave(counts).tolist(), found, strict=True):
        expected[expert] += 2 * row
    torch.testing.assert_close(first["down_bias"].double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_a_router_computes_in_float32_at_least(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    module = mixture(dtype=dtype).router
    x = inputs().flatten(0, 1).to(dtype)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        logits, weights, _ = module(x)
    assert logits.dtype == weights.dtype == torch.promote_types(dtype, torch.float32)
    expected = [
        [sum(a * b for a, b in zip(row, of, strict=True)) for of in module.weight.tolist()] for row in x.tolist()
    ]
    torch.testing.assert_close(logits.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def test_balance_moves_the_choice_and_not_the_weights() -> None:
    """An expert that is chosen for its balance alone still counts by its score."""
    module = mixture(experts={"per_token": 1, "normalize": False})
    module.router.balance[4] = 100.0
    x = inputs(1, 3)
    logits, weights, chosen = module.router(x.flatten(0, 1))
    assert chosen.flatten().tolist() == [4, 4, 4]
    for row, weight in zip(logits.tolist(), weights.flatten().tolist(), strict=True):
        assert weight == pytest.approx(math.exp(row[4]) / sum(math.exp(z) for z in row), rel=1e-12)
    assert not module.router.balance.requires_grad


@pytest.mark.parametrize(("top", "expected"), [(1, [1, 0]), (2, [2, 3])])
def test_experts_come_from_the_best_groups_by_hand(top: int, expected: list[int]) -> None:
    """Scores 0.4 and 0.9 are one group, 0.8 and 0.6 the other: the first has the best, the second the larger sum."""
    groups = {"count": 4, "groups": 2, "group_top": top, "scores": "sigmoid", "normalize": False, "scale": 3.0}
    module = mixture(experts=groups)
    scores = torch.tensor([0.4, 0.9, 0.8, 0.6], dtype=torch.float64)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:, 0] = scores.logit()
    _, weights, chosen = module.router(torch.eye(8, dtype=torch.float64)[:1])
    assert chosen.tolist() == [expected]
    torch.testing.assert_close(weights, 3 * scores[expected][None])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_scores_that_underflow_give_finite_weights(scores: str) -> None:
    module = mixture(experts={"scores": scores}, dtype=torch.float32)
    with torch.no_grad():
        module.router.balance += torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0])
        module.router.weight.zero_()
        module.router.weight[:2, 0], module.router.weight[2:, 0] = -400.0, 400.0
    _, weights, chosen = module.router(torch.ones(3, 8))
    assert sorted(chosen[0].tolist()) == [0, 1]
    assert torch.isfinite(weights).all()


def test_the_losses_of_a_router_by_hand() -> None:
    """Four tokens, two experts: 3 of them went to the first. P = (0.75 + 0.75 + 0.75 + 0.25) / 4 = 0.625."""
    logits = torch.tensor([[math.log(3.0), 0.0]] * 3 + [[0.0, math.log(3.0)]], dtype=torch.float64)
    routing = Routing(logits, chosen([3, 1]))
    assert routing.load_balancing_loss().item() == pytest.approx(2 * (0.75 * 0.625 + 0.25 * 0.375))
    assert routing.z_loss().item() == pytest.approx(math.log(4.0) ** 2)


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_even_loads_have_the_least_balancing_loss(per_token: int) -> None:
    even = Routing(torch.zeros(6, 3), chosen([2 * per_token] * 3))
    assert even.load_balancing_loss().item() == pytest.approx(per_token)
    uneven = Routing(torch.tensor([[2.0, 0.0, -1.0]] * 6), chosen([6, 6 * (per_token > 1), 6 * (per_token > 2)]))
    assert uneven.load_balancing_loss().item() >= per_token - 1e-6


def test_the_losses_have_the_gradients_of_slow_loops() -> None:
    logits = inputs(1, 6, 4)[0].requires_grad_()
    counts = [5, 1, 4, 2]
    routing = Routing(logits, chosen(counts))
    balancing = sum(
        counts[e] / 6 * sum(torch.exp(row[e]) / sum(torch.exp(z) for z in row) for row in logits) / 6 for e in range(4)
    )
    z_loss = sum(torch.log(sum(torch.exp(z) for z in row)) ** 2 for row in logits) / 6
    for ours, slow in ((routing.load_balancing_loss(), 4 * balancing), (routing.z_loss(), z_loss)):
        torch.testing.assert_close(ours, slow)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, slow)))


def test_the_routings_of_a_forward_pass_come_with_its_hidden_states_in_the_order_of_the_layers() -> None:
    """Layers without experts have none; and nothing of a pass stays in the network."""
    sizes = {"vocab_size": 9, "d_model": 8, "num_layers": 4, "num_heads": 1, "max_seq_len": 6, "dropout": 0.0}
    experts = {"count": 5, "per_token": 2, "layers": (0, 2, 3)}
    model = build_model(ModelConfig(**sizes, experts=experts), seed=1).eval()
    ids, seen = torch.tensor([[1, 5, 3], [2, 2, 8]]), []
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with watch(model, {"blocks.*.feed_forward.router.logits": seen.append}):
        outputs = model.run(ids)
    assert torch.equal(outputs.hidden_states, model.hidden_states(ids))
    assert len(outputs.routings) == len(seen) == 3
    for routing, logits, mixture_of_layer in zip(outputs.routings, seen, model.mixtures.values(), strict=True):
        assert torch.equal(routing.logits, logits)
        scores = logits + mixture_of_layer.router.balance
        assert routing.chosen.tolist() == [sorted(range(5), key=lambda e: -row[e])[:2] for row in scores.tolist()]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    plain = build_model(ModelConfig(**sizes), seed=1)
    assert plain.run(ids).routings == ()


def test_dropout_falls_on_hidden_units_and_keeps_the_mean() -> None:
    """Over many draws the mean stays; an expert whose activation is dropped still adds its bias."""
    module = mixture(dropout=0.5, dtype=torch.float32, experts={"per_token": 1})
    x = inputs(1, 2).float()
    exact, _ = module.eval()(x)
    torch.manual_seed(0)
    draws = torch.stack([module.train()(x)[0] for _ in range(800)])
    assert ((draws.mean(0) - exact).abs() < 5 * draws.std(0) / 800**0.5).all()
    with torch.no_grad():
        module.experts.down_proj.zero_()
        bias_only, _ = module.eval()(x)
        assert torch.equal(module.train()(x)[0], bias_only)
