"""muP in training: rates and decays of its groups, and the coordinate check, under every optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy
from sheepop.model.probe import record
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.optimizers.groups import set_learning_rate

WIDTHS = (64, 128, 256, 512)
# Rates at which a few steps move activations well, and break nothing at the base width.
RATES = {
    "adamw": 0.003,
    "adam": 0.003,
    "lion": 0.003,
    "schedule_free_adamw": 0.005,
    "adafactor": 0.3,
    "muon": 0.02,
    "sgd": 0.3,
}
POINTS = ("blocks.1.attention_output", "blocks.1.feed_forward_output", "blocks.1.output", "logits")
IDS = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(0))


def training(optimizer: str, **settings: Any) -> TrainingConfig:
    given = {"learning_rate": RATES[optimizer], "weight_decay": 0.0, "schedule": "constant", **settings}
    return TrainingConfig(optimizer=optimizer, **given)


def network(width: int, **settings: Any) -> Transformer:
    """Two layers; the heads, of 16 columns, grow in number unless `num_heads` says otherwise."""
    sizes = {"vocab_size": 32, "num_layers": 2, "num_heads": width // 16, "d_ff": 2 * width, "max_seq_len": 16}
    keys = {"position_encoding": "rope", "norm": "rmsnorm", "bias": False, "tie_weights": False, "dropout": 0.0}
    return build_model(ModelConfig(d_model=width, **{**sizes, **keys, **settings}), 0)


def changes(model: Transformer, config: TrainingConfig, points: Sequence[str] = POINTS) -> list[float]:
    """By how much (root mean square) four steps on one batch change what stands at the points."""
    optimizers = build_optimizers(model, config)

    def look() -> dict[str, torch.Tensor]:
        with record(model, points) as values, torch.no_grad():
            model(IDS[:, :-1])
        return values

    before = look()
    for _ in range(4):
        cross_entropy(model(IDS[:, :-1]), IDS[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = look()
    return [(after[point] - before[point]).square().mean().sqrt().item() for point in points]


def growth(optimizer: str, widths: tuple[int, ...], **settings: Any) -> list[float]:
    """The change at each point at the greatest width, divided by that at the least."""
    first, last = (changes(network(width, **settings), training(optimizer)) for width in (widths[0], widths[-1]))
    return [wide / narrow for narrow, wide in zip(first, last, strict=True)]


# Muon's iterations are slow at great widths.
WIDEST = {"muon": (64, 256)}
MUP = {"initialization": "mup", "mup_base_d_model": 64}


@pytest.mark.parametrize("optimizer", RATES)
def test_coordinate_check(optimizer: str) -> None:
    """Under muP steps change activations by as much at every width; under the usual scheme by more and more."""
    widths = WIDEST.get(optimizer, WIDTHS)
    assert all(0.6 < ratio < 1.6 for ratio in growth(optimizer, widths, **MUP))
    usual = growth(optimizer, widths)
    assert all(ratio > 1.3 for ratio in usual)
    assert max(usual) > 4.0


@pytest.mark.parametrize("settings", [{"num_heads": 4, "mup_base_head_dim": 16}, {"tie_weights": True}], ids=str)
def test_coordinate_check_of_growing_heads_and_of_tied_weights(settings: dict[str, Any]) -> None:
    every = [changes(network(width, **MUP, **settings), training("adamw")) for width in WIDTHS]
    for of_point in zip(*every, strict=True):
        assert max(of_point) < 1.6 * min(of_point)


def test_coordinate_check_of_experts() -> None:
    """The router's scores, too, change by as much at every width."""
    experts = {"count": 4, "per_token": 4, "scores": "sigmoid", "normalize": False}
    router = "blocks.1.feed_forward.router.logits"
    every = []
    for width in WIDTHS:
        model = network(width, **MUP, experts=experts, activation="swiglu", d_ff=width)
        every += changes(model, training("adamw"), [router])
    assert max(every) < 2 * min(every)


def test_rates_are_multiplied_and_each_step_decays_as_much_at_every_width() -> None:
    model = network(128, **MUP)
    optimizers = build_optimizers(model, training("adamw", learning_rate=0.1, weight_decay=0.5))
    set_learning_rate(optimizers, 0.2)
    groups = {id(p): group for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = groups[id(parameter)]
        inner = "_proj" in name
        assert group["lr"] == pytest.approx(0.1 if inner else 0.2), name
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 if parameter.ndim == 2 else 0.0), name


# At four times the base's width: the factors of the rate inside the network, and of embeddings, head and norms.
FACTORS = {
    "adamw": (1 / 4, 1),
    "adam": (1 / 4, 1),
    "lion": (1 / 4, 1),
    "schedule_free_adamw": (1 / 4, 1),
    "adafactor": (1 / 2, 1),
    "muon": (1 / 2, 1),
    "sgd": (1, 4),
}


@pytest.mark.parametrize("optimizer", RATES)
def test_the_rates_of_every_optimizer_fall_as_its_kind_of_steps_asks(optimizer: str) -> None:
    model = network(256, **MUP)
    optimizers = build_optimizers(model, training(optimizer, learning_rate=0.8))
    rates = {id(p): group["lr"] for one in optimizers for group in one.param_groups for p in group["params"]}
    inner, outer = FACTORS[optimizer]
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.8 * (inner if "_proj" in name else outer)), name


def test_factors_of_layers_and_of_mup_multiply() -> None:
    model = network(256, **MUP)
    layers = ({"pattern": "blocks.0.*", "learning_rate": 0.5, "weight_decay": 0.3},)
    (optimizer,) = build_optimizers(model, training("lion", learning_rate=0.8, layers=layers))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    group = groups[id(model.blocks[0].attention.q_proj.weight)]
    assert group["lr"] == pytest.approx(0.8 * 0.5 / 4)
    assert group["weight_decay"] == pytest.approx(0.3 * 4)


def test_adam_with_a_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer: adam need training.weight_decay: 0"):
        build_optimizers(network(64, **MUP), training("adam", weight_decay=0.1))
    with pytest.raises(ConfigError, match=r"optimizer: adam need training.weight_decay: 0"):
        build_optimizers(network(64, **MUP), training("adam", layers=({"pattern": "blocks.*", "weight_decay": 0.1},)))
    assert build_optimizers(network(64), training("adam", weight_decay=0.1))


def test_what_mup_has_no_rule_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no rule for blocks\.0\.attention\.sinks with updates of the kind gradient"):
        build_optimizers(network(64, **MUP, attention_sinks=True), training("sgd"))
