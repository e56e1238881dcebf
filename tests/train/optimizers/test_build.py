"""Which parameters belong to which optimizer and group, how they are decayed, and at which rate they learn."""

import pytest
import torch
from torch import nn

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, build_model
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.optimizers.groups import set_learning_rate


def one_matrix(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return module


def test_adamw_gives_the_worked_values() -> None:
    module = one_matrix(0.5)
    config = TrainingConfig(learning_rate=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    (optimizer,) = build_optimizers(module, config)
    seen = []
    for gradient in (0.3, -0.2):
        module.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        seen.append(module.weight.item())
    assert seen == pytest.approx([0.498995000, 0.498845490], abs=1e-7)


def test_decay_is_decoupled_from_the_gradient() -> None:
    module = one_matrix(0.5)
    (optimizer,) = build_optimizers(module, TrainingConfig(learning_rate=0.1, weight_decay=0.2))
    module.weight.grad = torch.zeros(1, 1)
    optimizer.step()
    assert module.weight.item() == pytest.approx(0.5 * (1 - 0.1 * 0.2))


def test_only_matrices_are_decayed() -> None:
    model = build_model(
        ModelConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=20, position_encoding="learned"), 0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for optimizer in build_optimizers(model, TrainingConfig(learning_rate=0.1, weight_decay=0.5)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_belongs_to_exactly_one_group(optimizer: str) -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=2, num_heads=2, vocab_size=20), 0)
    optimizers = build_optimizers(model, TrainingConfig(optimizer=optimizer))
    held = [id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    if optimizer == "muon":
        inner = {id(p) for name, p in model.named_parameters() if "blocks." in name and p.ndim == 2}
        assert {id(p) for group in optimizers[0].param_groups for p in group["params"]} == inner


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_are_stacks_of_matrices_and_their_biases_vectors(optimizer: str) -> None:
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    model = build_model(ModelConfig(**sizes, experts={"count": 3}, activation="swiglu"), 0)
    optimizers = build_optimizers(model, TrainingConfig(optimizer=optimizer, weight_decay=0.5))
    found = {
        id(p): (type(o).__name__, group["weight_decay"]) for o in optimizers for group in o.param_groups
        for p in group["params"]
    }  # fmt: skip
    inner = "Muon" if optimizer == "muon" else "AdamW"
    for name, parameter in model.blocks[0].feed_forward.named_parameters():
        is_bias = name.endswith("_bias")
        assert found[id(parameter)] == (("AdamW", 0.0) if is_bias else (inner, 0.5)), name


def test_set_learning_rate_reaches_every_group() -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=20), 0)
    optimizers = build_optimizers(model, TrainingConfig(optimizer="muon"))
    set_learning_rate(optimizers, 0.25)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.25}


def layered(*layers: dict[str, object], **settings: object) -> list[torch.optim.Optimizer]:
    model = build_model(ModelConfig(d_model=16, num_layers=12, num_heads=2, vocab_size=20), 0)
    return build_optimizers(model, TrainingConfig(layers=layers, **settings))


@pytest.mark.parametrize("optimizer", list(OPTIMIZER_NAMES))
def test_the_first_pattern_that_matches_says_rate_and_decay(optimizer: str) -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=12, num_heads=2, vocab_size=20), 0)
    layers = (
        {"pattern": "blocks.1.*", "learning_rate": 0.5},
        {"pattern": "blocks.*", "learning_rate": 0.25, "weight_decay": 0.3},
    )
    config = TrainingConfig(optimizer=optimizer, schedule="constant", layers=layers, weight_decay=0.1)
    optimizers = build_optimizers(model, config)
    set_learning_rate(optimizers, 0.8)
    found = {id(p): (g["lr"], g["weight_decay"]) for o in optimizers for g in o.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        rate, decay = (
            (0.4, 0.1) if name.startswith("blocks.1.") else (0.2, 0.3) if name.startswith("blocks.") else (0.8, 0.1)
        )
        assert found[id(parameter)] == pytest.approx((rate, decay if parameter.ndim == 2 else 0.0)), name


def test_a_decay_of_zero_for_a_layer_is_a_decay_and_not_the_general_one() -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=2, num_heads=2, vocab_size=20), 0)
    config = TrainingConfig(layers=({"pattern": "blocks.0.*", "weight_decay": 0},), weight_decay=0.1)
    (optimizer,) = build_optimizers(model, config)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays[id(model.blocks[0].attention.q_proj.weight)] == 0.0
    assert decays[id(model.blocks[1].attention.q_proj.weight)] == 0.1


def test_a_factor_of_zero_leaves_weights_as_they_are() -> None:
    model = build_model(ModelConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=20), 0)
    before = model.embedding.weight.detach().clone()
    config = TrainingConfig(layers=({"pattern": "embedding.*", "learning_rate": 0},))
    (optimizer,) = build_optimizers(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(model.embedding.weight, before)
    assert not torch.equal(model.final_norm.weight, torch.ones(16))


def test_a_pattern_without_a_match_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"no parameter matches 'block\.0\.attention'.*blocks\.0\.attention"):
        layered({"pattern": "block.0.attention"})


def test_a_pattern_that_comes_too_late_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"earlier patterns match everything that 'blocks\.1\.\*' matches"):
        layered({"pattern": "blocks.*"}, {"pattern": "blocks.1.*", "learning_rate": 0.5})


def test_a_decay_of_vectors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matches only vectors, such as final_norm\.weight"):
        layered({"pattern": "final_norm*", "weight_decay": 0.5})
