"""The curvature of the loss: products with the Hessian, its largest eigenvalue, and the limits of the optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from sheepop.core.errors import UsageError
from sheepop.interpret.control.curvature import (
    HessianProducts,
    MeanLoss,
    Scaling,
    adamw_limit,
    largest_eigenvalue,
    muon_limit,
    sgd_limit,
)
from sheepop.interpret.control.operating_point import stepwise_attention
from sheepop.interpret.control.stability import StepResponse, loss_along, measure_sharpness, turning_factor
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.train.optimizers.momentum import Lion, Muon, orthogonalize
from sheepop.train.tensor_batch import TensorBatch

SIZES = {"vocab_size": 5, "d_model": 4, "num_layers": 1, "num_heads": 2, "max_seq_len": 4, "d_ff": 4, "norm": "rmsnorm"}
RATE = 0.1


def toy(**settings: object) -> Transformer:
    return build_model(ModelConfig(**{**SIZES, **settings}), 0).double().eval()


def batch() -> TensorBatch:
    ids = torch.randint(5, (3, 5), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[0, 2] = -100
    return TensorBatch({"input_ids": ids[:, :-1]}, labels, slice(None))


def batch_of(model: Transformer) -> TensorBatch:
    """The batch, with a source for an encoder-decoder."""
    found = batch()
    if model.architecture == "decoder":
        return found
    return TensorBatch({**found.inputs, "source_ids": found.inputs["input_ids"].flip(1)}, found.labels, slice(None))


def whole_hessian(model: Transformer) -> Tensor:
    """The Hessian of the mean loss over the flat weights, by torch.func."""
    loss, weights, rows = MeanLoss(model), dict(model.named_parameters()), batch_of(model)
    sizes = [weight.numel() for weight in weights.values()]

    def of_flat(flat: Tensor) -> Tensor:
        parts = zip(weights, flat.split(sizes), weights.values(), strict=True)
        given = {f"model.{name}": part.view_as(weight) for name, part, weight in parts}
        found: Tensor = functional_call(loss, given, (rows,))
        return found

    flat = torch.cat([weight.detach().flatten() for weight in weights.values()])
    with stepwise_attention(model):
        found: Tensor = torch.func.hessian(of_flat)(flat)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"position_encoding": "rope", "activation": "swiglu", "num_kv_heads": 1, "tie_weights": False},
        {"norm": "rmsnorm_zero_centered", "position_encoding": "alibi", "qk_norm": "head", "attention_soft_cap": 5.0},
        {"architecture": "encoder_decoder", "num_encoder_layers": 1},
    ],
)
def test_products_and_eigenvalue_are_those_of_the_whole_hessian(settings: dict[str, object]) -> None:
    model = toy(**settings)
    expected, weights = whole_hessian(model), list(model.parameters())
    with stepwise_attention(model):
        products = HessianProducts(MeanLoss(model)(batch_of(model)), weights)
        columns = torch.stack([products(row) for row in torch.eye(len(expected), dtype=torch.float64)], -1)
        found = largest_eigenvalue(products, torch.ones(len(expected), dtype=torch.float64), iterations=60)
    assert torch.allclose(columns, expected, atol=1e-12)
    top = torch.linalg.eigvalsh(expected)[-1]
    assert float(top) - found.residual <= found.value <= float(top) + 1e-12
    assert found.residual <= 0.02 * found.value
    assert torch.allclose(expected @ found.direction, found.value * found.direction, atol=2 * found.residual)


def test_a_loss_that_is_not_finite_has_no_sharpness_and_ends_no_run() -> None:
    found = largest_eigenvalue(lambda vector: vector / 0.0, torch.ones(3), iterations=5)
    assert math.isnan(found.value) and math.isnan(found.residual) and found.iterations == 1


def test_products_with_layer_norms_are_differences_of_gradients() -> None:
    """torch.func.hessian is not symmetric where a layer norm has a weight, so gradients nearby are the measure."""
    model = toy(norm="layernorm")
    weights = list(model.parameters())
    direction = torch.randn(sum(map(Tensor.numel, weights)), generator=torch.Generator().manual_seed(2)).double()
    with stepwise_attention(model):
        found = HessianProducts(MeanLoss(model)(batch()), weights)(direction)
    gradients = []
    for way in (1e-5, -2e-5):
        parts = direction.split([weight.numel() for weight in weights])
        with torch.no_grad():
            for weight, part in zip(weights, parts, strict=True):
                weight += way * part.view_as(weight)
        gradient = torch.autograd.grad(MeanLoss(model)(batch()), weights)
        gradients.append(torch.cat([each.flatten() for each in gradient]))
    assert torch.allclose(found, (gradients[0] - gradients[1]) / 2e-5, atol=1e-8)


def grows(step: Callable[[Tensor], object], start: Tensor, steps: int = 1500) -> bool:
    """Whether a weight on a quadratic ends farther from 0 than it began."""
    weight = start.clone()
    for _ in range(steps):
        step(weight)
    return not abs(float(weight[0])) < abs(float(start[0]))


def quadratic(optimizer: torch.optim.Optimizer, curvature: float) -> Callable[[Tensor], object]:
    """A step of an optimizer on half of curvature times the square of its one weight."""
    (parameter,) = optimizer.param_groups[0]["params"]

    def step(weight: Tensor) -> None:
        parameter.grad = curvature * parameter.detach()
        optimizer.step()
        weight.copy_(parameter.detach())

    return step


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_averaged_momentum_is_stable_up_to_its_limit(decay: float) -> None:
    """AdamW with a preconditioner that does not change: the scaled gradient is averaged and the weight decays."""
    limit = adamw_limit(0.9, RATE, decay)
    assert adamw_limit(0.9, RATE, 0.0) == pytest.approx(38 / RATE)
    for curvature, expected in ((0.99 * limit, False), (1.01 * limit, True)):
        average = 0.0

        def step(weight: Tensor, curvature: float = curvature) -> None:
            nonlocal average
            average = 0.9 * average + 0.1 * curvature * float(weight)
            weight.mul_(1 - RATE * decay).sub_(RATE * average)

        assert grows(step, torch.ones(1, dtype=torch.float64)) is expected


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_sgd_with_momentum_is_stable_up_to_its_limit(share: float) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=RATE, momentum=0.9)
    step = quadratic(optimizer, share * sgd_limit(0.9, RATE))
    assert grows(step, torch.ones(1, dtype=torch.float64)) is (share > 1)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_averaged_nesterov_momentum_is_stable_up_to_its_limit(share: float, decay: float) -> None:
    """Muon with a preconditioner that does not change."""
    momentum, curvature = 0.0, share * muon_limit(0.95, RATE, decay)

    def step(weight: Tensor) -> None:
        nonlocal momentum
        gradient = curvature * float(weight)
        momentum = 0.95 * momentum + 0.05 * gradient
        weight.mul_(1 - RATE * decay).sub_(RATE * (0.05 * gradient + 0.95 * momentum))

    assert grows(step, torch.ones(1, dtype=torch.float64)) is (share > 1)


def taken(kind: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], model: Transformer) -> torch.optim.Optimizer:
    """An optimizer of all matrices that has taken two steps."""
    optimizer = kind([weight for weight in model.parameters() if weight.ndim > 1])
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(MeanLoss(model)(batch()))
        optimizer.step()
    return optimizer


def test_the_share_is_that_of_the_scaled_hessian() -> None:
    """AdamW: rate / limit / (deviation + eps), on both sides of the Hessian, by hand."""
    model = toy(tie_weights=False)
    optimizer = taken(lambda weights: torch.optim.AdamW(weights, lr=RATE, betas=(0.8, 0.9), eps=1e-3), model)
    found = measure_sharpness(model, [optimizer], batch(), torch.Generator().manual_seed(0), iterations=40)
    scale = []
    for weight in model.parameters():
        state = optimizer.state.get(weight)
        if state is None:
            scale.append(torch.zeros(weight.numel(), dtype=torch.float64))
            continue
        deviation = (state["exp_avg_sq"] / (1 - 0.9**2)).sqrt() + 1e-3
        scale.append((1 / (1 - 0.8**2) / deviation).flatten())
    root = torch.cat(scale).sqrt()
    own = torch.linalg.eigvalsh(root[:, None] * whole_hessian(model) * root)[-1]
    assert found.value == pytest.approx(float(own), rel=0.02)
    assert found.limit == pytest.approx(1.8 * (2 - RATE * 0.01) / (RATE * 0.2))
    assert found.share == pytest.approx(found.value / found.limit)
    assert set(found.places) <= {name for name, weight in model.named_parameters() if weight.ndim > 1}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Muon])
def test_a_decay_that_is_unstable_by_itself_leaves_all_but_no_limit(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """From a rate times a decay of 2 on, the limit has 1e-6 for its factor 2, so the share is 2e6 times as large."""
    model, shares = toy().float(), []
    optimizer = taken(partial(kind, lr=1e-3), model)
    for decay in (0.0, 3e3):
        optimizer.param_groups[0]["weight_decay"] = decay
        shares.append(measure_sharpness(model, [optimizer], batch(), torch.Generator().manual_seed(0)).share)
    assert shares[1] == pytest.approx(2e6 * shares[0], rel=1e-3) and shares[0] > 0


def test_what_never_had_a_gradient_does_not_move() -> None:
    """Adam would divide it by eps alone, and a dead head would look like a rate a thousand times too high."""
    model = toy(tie_weights=False)
    optimizer = taken(torch.optim.AdamW, model)
    weight = model.layers[0].feed_forward.up_proj.weight
    optimizer.state[weight]["exp_avg_sq"][0] = 0
    scaling = Scaling.of(model, [optimizer])
    moved = scaling(torch.ones(sum(each.numel() for each in scaling.parameters)))
    place = scaling.names.index("blocks.0.feed_forward.up_proj.weight")
    own = moved.split([each.numel() for each in scaling.parameters])[place].view_as(weight)
    assert (own[0] == 0).all() and (own[1:] > 0).any()


def test_a_layer_with_a_far_higher_rate_is_where_the_loss_is_sharpest() -> None:
    model = toy(num_layers=2)
    fast = list(model.layers[1].parameters())
    slow = [weight for weight in model.parameters() if not any(weight is each for each in fast)]
    optimizer = torch.optim.AdamW([{"params": slow}, {"params": fast, "lr": 60 * RATE}], lr=RATE)
    torch.autograd.backward(MeanLoss(model)(batch()))
    optimizer.step()
    found = measure_sharpness(model, [optimizer], batch(), torch.Generator().manual_seed(0), iterations=30)
    layer, share = next(iter(found.layers.items()))
    assert layer == "blocks.1" and share > 0.8


def test_muons_scaling_maps_the_momentum_to_its_update() -> None:
    model = toy(d_ff=6).float()
    for weight in (model.layers[0].feed_forward.up_proj.weight, model.layers[0].feed_forward.down_proj.weight):
        optimizer = Muon([weight], lr=RATE)
        torch.autograd.backward(MeanLoss(model)(batch()))
        optimizer.step()
        scaling, momentum = Scaling.of(model, [optimizer]), optimizer.state[weight]["momentum"]
        moved = scaling(scaling(momentum.flatten())).view_as(momentum) * scaling.limit
        expected = orthogonalize(momentum[None].float())[0] * 0.2 * max(momentum.shape) ** 0.5
        assert torch.allclose(moved.float(), expected, atol=1e-4)


def test_a_share_alone_is_certain_where_the_scaling_does_not_follow_the_gradient() -> None:
    """Two steps are as many as a second beta of 0.5 averages over, and too few for one of 0.9."""
    model = toy().float()
    late, early = (partial(torch.optim.AdamW, lr=RATE, betas=(0.9, beta)) for beta in (0.5, 0.9))
    kinds = (partial(torch.optim.SGD, lr=RATE), late, early, partial(Muon, lr=RATE))
    optimizers = [taken(kind, model) for kind in kinds]
    assert [Scaling.of(model, [each]).certain for each in optimizers] == [1.2, 2.0, math.inf, 100.0]
    assert Scaling.of(model, [optimizers[1], optimizers[3]]).certain == 100.0
    assert Scaling.of(model, [optimizers[2], optimizers[3]]).certain == math.inf


@pytest.mark.parametrize("kind", [Muon, torch.optim.AdamW])
def test_a_scaling_that_follows_the_gradient_ends_the_growth_that_plain_descent_has(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """On a quadratic of any curvature, however far beyond a linear limit, the weight ends within some steps' length."""
    lengths = []
    for optimizer_of in (kind, torch.optim.SGD):
        weight = nn.Parameter(torch.eye(2))
        optimizer = optimizer_of([weight], lr=1e-2)
        for _ in range(600):
            weight.grad = 1e3 * weight.detach()
            optimizer.step()
        lengths.append(float(weight.detach().norm()))
    assert lengths[0] < 0.5 and not lengths[1] < 1e9


def test_an_optimizer_without_limit_or_state_is_refused() -> None:
    model = toy()
    with pytest.raises(UsageError, match="The limit of Lion is not known"):
        Scaling.of(model, [Lion(model.parameters())])
    with pytest.raises(UsageError, match="no state yet"):
        Scaling.of(model, [torch.optim.AdamW(model.parameters())])


@pytest.mark.parametrize(("share", "factor"), [(0.5, 4.0), (1.6, 1.25), (4.0, 0.5)])
def test_a_quadratic_turns_where_its_curvature_says(share: float, factor: float) -> None:
    """A step of rate r on a quadratic of curvature a lowers the loss until it is 2 / (r a) times as long."""
    curvature = share / RATE
    assert turning_factor(lambda way: (1 - way * RATE * curvature) ** 2) == pytest.approx(factor, rel=0.05)
    found = StepResponse.of(lambda way: (1 - way * RATE * curvature) ** 2)
    assert found.critical(RATE) == pytest.approx(curvature, rel=0.05)


def test_the_turn_is_bounded() -> None:
    assert turning_factor(lambda way: -way) == 64
    assert turning_factor(lambda way: way) == 0


@pytest.mark.parametrize("lowest", [0.1, 0.8, 7.0])
def test_a_loss_along_a_step_has_its_minimum_where_it_was_put(lowest: float) -> None:
    """(a - c)^2 is lowest at c and back at its first value at 2 c."""
    found = StepResponse.of(lambda way: (way - lowest) ** 2 + 1)
    assert found.lowest == pytest.approx(lowest, rel=0.02) and found.turning == pytest.approx(2 * lowest, rel=0.05)
    assert found.loss(0.0) == lowest**2 + 1 and found.loss(1.0) == pytest.approx((1 - lowest) ** 2 + 1)
    assert list(found.factors) == sorted(found.factors) and min(found.losses) == found.loss(found.lowest)


def test_a_loss_that_only_falls_or_only_rises_has_no_minimum_between() -> None:
    assert StepResponse.of(lambda way: -way).lowest == 64
    assert StepResponse.of(lambda way: way).lowest == 0


def test_the_loss_along_an_update_is_that_of_the_moved_weights() -> None:
    model = toy()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    update = {name: torch.full_like(weight, 0.01) for name, weight in before.items()}
    loss_at = loss_along(model, before, update, batch())
    found = [loss_at(0.0), loss_at(2.0)]
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    with torch.no_grad():
        expected = [float(MeanLoss(model)(batch()))]
        for weight in model.parameters():
            weight += 0.02
        expected.append(float(MeanLoss(model)(batch())))
    assert found == pytest.approx(expected)
