"""LoRA against the same sums in float64, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.adapt.lora import LoraLinear, LowRank, activate, adapted_layers, adapters, add_lora, merged
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import quantize
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.head import OutputHead

IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(3))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"rank_stabilised": True, "rank": 5},
    "DoRA": {"dora": True},
    "with dropout": {"dropout": 0.3},
    "some layers": {"targets": ("q_proj", "feed_forward.*")},
}


def network(**settings: Any) -> Transformer:
    config = {"vocab_size": 40, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16, "dropout": 0.0}
    return build_model(ModelConfig(**{**config, **settings}), seed=1).eval()


def drawn(model: Transformer, seed: int = 0) -> None:
    """Gives every change weights that are not 0."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            for change in layer.changes.values():
                for weight in change.parameters():
                    weight += 0.1 * torch.randn(weight.shape, generator=draws)


def by_hand(layer: LoraLinear, change: LowRank, x: Tensor) -> Tensor:
    config = change.config
    scale = config.alpha / (config.rank**0.5 if config.rank_stabilised else config.rank)
    weight = layer.weight.detach().double() + scale * change.up.detach().double() @ change.down.detach().double()
    if change.magnitude is not None:
        weight = weight * (change.magnitude.detach().double() / weight.square().sum(1).sqrt())[:, None]
    return x.double() @ weight.T + (0.0 if layer.bias is None else layer.bias.detach().double())


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_computes_what_the_paper_says(name: str) -> None:
    model = network(bias=True)
    add_lora(model, LoraConfig(**KINDS[name]))
    drawn(model)
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(7))
    layer = model.get_submodule("blocks.1.attention.q_proj")
    assert isinstance(layer, LoraLinear)
    change = layer.changes["default"]
    assert isinstance(change, LowRank)
    torch.testing.assert_close(layer(x).double(), by_hand(layer, change, x), rtol=1e-5, atol=1e-5)


def test_the_product_of_one_change_has_the_slopes_of_its_formula_and_one_tensor_of_its_size() -> None:
    model = network(bias=False)
    add_lora(model, LoraConfig(rank=2, alpha=3))
    drawn(model)
    layers = (layer for layer in adapted_layers(model.double()).values() if isinstance(layer, LoraLinear))
    layer = next(layer for layer in layers if layer.in_features != layer.out_features)
    change = layer.changes["default"]
    assert isinstance(change, LowRank)
    x = torch.randn(2, 3, layer.in_features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(x), (x, change.down, change.up))
    assert torch.autograd.gradgradcheck(lambda *_: layer(x), (x, change.down, change.up))
    large: list[str] = []

    class Large(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            is_new = isinstance(found, Tensor) and found.numel() == 6 * layer.out_features
            large.extend([str(func.overloadpacket)] if is_new else [])
            return found

    with Large():
        found = layer(x)
    torch.testing.assert_close(found, by_hand(layer, change, x))
    assert large == ["aten.mm", "aten.addmm_", "aten.view"]  # the second works in place, and the third moves nothing


@pytest.mark.parametrize("name", KINDS)
def test_a_network_begins_as_it_was_and_merges_into_what_it_became(name: str) -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(IDS)
        add_lora(model, LoraConfig(**KINDS[name]))
        torch.testing.assert_close(model(IDS), expected, rtol=1e-5, atol=1e-5)
        drawn(model)
        changed = model(IDS)
        assert (changed - expected).abs().max() > 0.01
        whole = merged(model)
        torch.testing.assert_close(whole(IDS), changed, rtol=1e-4, atol=1e-4)
    assert whole.state_dict().keys() == before.keys()
    assert not adapted_layers(whole)
    assert whole.embedding.weight is model.embedding.weight
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_only_the_change_learns_and_dora_takes_its_length_for_a_constant() -> None:
    model = network()
    add_lora(model, LoraConfig(dora=True, rank=2))
    drawn(model)
    model.train()
    model(IDS).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".changes." in name), name
    layer = model.get_submodule("blocks.0.feed_forward.up_proj")
    assert isinstance(layer, LoraLinear)
    change = layer.changes["default"]
    assert isinstance(change, LowRank)
    x = torch.randn(4, 32)
    length = (layer.weight + change.change()).norm(dim=1).detach()
    down, up, magnitude = (p.detach().clone().requires_grad_() for p in (change.down, change.up, change.magnitude))
    weight = (magnitude / length)[:, None] * (layer.weight.detach() + change.config.scale * up @ down)
    wanted = torch.autograd.grad((x @ weight.T).square().sum(), (down, up, magnitude))
    found = torch.autograd.grad(layer(x).square().sum(), (change.down, change.up, change.magnitude))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_beside_integers_a_change_learns_as_beside_the_numbers_they_stand_for(stored: Any) -> None:
    gradients = []
    rounded = quantize(network(), stored)
    plain = network()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(rounded.get_parameter(name) + 0)
    for model in (rounded, plain):
        add_lora(model, LoraConfig(rank=4))
        drawn(model)
        model(IDS).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(gradients[0]) == len(gradients[1]) == 2 * len(adapted_layers(plain))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    with pytest.raises(ConfigError, match=f"stored in {stored}. Merge the adapter into the model before"):
        merged(rounded)


def test_an_embedding_of_its_own_is_changed_by_rows() -> None:
    model = network(tie_weights=False)
    add_lora(model, LoraConfig(targets=("embedding",), rank=3))
    drawn(model)
    change = adapted_layers(model)["embedding"].changes["default"]
    assert isinstance(change, LowRank)
    expected = model.embedding.weight[IDS] + change.config.scale * (change.up @ change.down).T[IDS]
    torch.testing.assert_close(model.embedding(IDS), expected)
    torch.testing.assert_close(merged(model)(IDS), model(IDS), rtol=1e-4, atol=1e-4)
    assert type(merged(model).embedding) is nn.Embedding


@pytest.mark.parametrize("settings", [{}, {"bias": True, "tie_weights": False, "logit_soft_cap": 3.0}], ids=str)
def test_an_output_projection_learns_a_change_from_parts_of_the_logits_as_from_all(settings: dict[str, Any]) -> None:
    model = network(**settings)
    add_lora(model, LoraConfig(targets=("embedding", "lm_head"), rank=3))
    drawn(model)
    head, labels = model.lm_head, IDS.roll(-1, 1)
    labels[0, 3] = -100
    changes = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(changes) == 4
    hidden = model.hidden_states(IDS)
    change = adapted_layers(model)["lm_head"].changes["default"]
    assert isinstance(change, LowRank)
    logits = (
        hidden.double() @ (head.weight.double() + change.config.scale * change.up.double() @ change.down.double()).T
    )
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()
    torch.testing.assert_close(head(hidden).double(), logits, rtol=1e-4, atol=1e-4)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = torch.autograd.grad(losses.sum(), changes, retain_graph=True)
    sums = head.cross_entropy(hidden, labels)
    assert float(head.score(hidden.detach(), labels)[0]) == pytest.approx(float(losses.detach().sum()), rel=1e-5)
    assert float(sums.objective) == pytest.approx(float(losses.detach().sum()), rel=1e-5)
    in_parts = -head.log_probabilities(hidden, labels)
    torch.testing.assert_close(in_parts.flatten().double(), losses, rtol=1e-4, atol=1e-5)
    for loss in (sums.objective, in_parts.sum()):
        found = torch.autograd.grad(loss, changes, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-5)
    whole = merged(model)
    assert not whole.config.tie_weights and whole.lm_head.weight is not whole.embedding.weight
    assert type(whole.lm_head) is OutputHead
    torch.testing.assert_close(whole(IDS), model(IDS), rtol=1e-4, atol=1e-4)


def test_changes_are_added_up_and_taken_away() -> None:
    model = network()
    with torch.no_grad():
        plain = model(IDS)
        add_lora(model, LoraConfig(targets=("q_proj",)), name="one", seed=1)
        add_lora(model, LoraConfig(targets=("q_proj", "down_proj"), rank=2), name="two", seed=2)
        drawn(model)
        assert adapters(model) == ("one", "two")
        layer = adapted_layers(model)["blocks.0.attention.q_proj"]
        x = torch.randn(2, 32)
        outputs = {}
        for names in ((), ("one",), ("two",), ("one", "two")):
            activate(model, *names)
            outputs[names] = layer(x)
        torch.testing.assert_close(outputs["one", "two"] + outputs[()], outputs["one",] + outputs["two",])
        torch.testing.assert_close(merged(model)(IDS), model(IDS), rtol=1e-4, atol=1e-4)
        activate(model)
        assert torch.equal(model(IDS), plain)
    activate(model, "two")
    assert {name.split(".changes.")[1].split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        "two"
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ["k_prj"]},
            "No layer of the model matches 'k_prj'. Layers that can have an adapter: down_proj, embedding, k_proj",
        ),
        ({"targets": ["lm_head"], "dora": True}, "DoRA adapts linear layers, and lm_head is computed in parts"),
        ({"targets": []}, "targets"),
        ({"rank": 0}, "rank"),
        ({"alpha": float("nan")}, "alpha"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_lora(network(), LoraConfig(**settings))


def test_names_are_taken_once_and_must_be_known() -> None:
    model = network(tie_weights=False)
    add_lora(model, LoraConfig())
    with pytest.raises(ConfigError, match="already has an adapter called 'default'"):
        add_lora(model, LoraConfig())
    with pytest.raises(ConfigError, match="no adapter called 'other'; it has: default"):
        activate(model, "other")
    with pytest.raises(ConfigError, match="DoRA adapts linear layers, and embedding is not linear"):
        add_lora(network(tie_weights=False), LoraConfig(dora=True, targets=("embedding",)))
