"""Activation checkpointing changes memory and time, and not one bit of a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.core.errors import ConfigError
from sheepop.core.random import seed_torch
from sheepop.model import ModelConfig, Transformer, build_model, cross_entropy_sum
from sheepop.train import TrainingConfig
from sheepop.train.activation_checkpointing import (
    ActivationBytes,
    apply_activation_checkpointing,
    measure_activations,
    resolve_activation_checkpointing,
)
from sheepop.train.network import Network
from sheepop.train.objective import TensorBatch

ROWS, LENGTH = 2, 48


def network(dropout: float = 0.1, **settings: Any) -> Transformer:
    sizes = {"vocab_size": 61, "d_model": 32, "num_layers": 3, "num_heads": 4, "max_seq_len": LENGTH}
    return build_model(ModelConfig(**{**sizes, "dropout": dropout, **settings}), seed=3).train()


def packed_batch(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    begins = torch.rand(rows, LENGTH, generator=generator) < 0.1
    return {
        "input_ids": torch.randint(61, (rows, LENGTH), generator=generator),
        "labels": torch.randint(61, (rows, LENGTH), generator=generator),
        "document_ids": begins.long().cumsum(1),
    }


def loss_and_gradients(model: Transformer, precision: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    batch = packed_batch()
    seed_torch(0, "dropout", 5)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        logits = model(batch["input_ids"], document_ids=batch["document_ids"])
        loss = cross_entropy_sum(logits, batch["labels"])
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("architecture", [{}, {"position_encoding": "rope", "activation": "swiglu", "num_kv_heads": 2}])
@pytest.mark.parametrize(("mode", "num_blocks"), [("selective", None), ("full", None), ("full", 1), ("selective", 2)])
def test_loss_and_gradients_are_the_same_bit_for_bit(mode, num_blocks, architecture, dropout, precision) -> None:
    plain, checkpointed = network(dropout, **architecture), network(dropout, **architecture)
    apply_activation_checkpointing(checkpointed, mode, num_blocks)
    expected_loss, expected = loss_and_gradients(plain, precision)
    loss, gradients = loss_and_gradients(checkpointed, precision)
    assert torch.equal(loss, expected_loss)
    for (name, _), one, other in zip(plain.named_parameters(), gradients, expected, strict=True):
        assert torch.equal(one, other), name


def test_names_and_weights_stay_as_they_are() -> None:
    plain, checkpointed = network(), network()
    apply_activation_checkpointing(checkpointed, "selective")
    assert list(plain.state_dict()) == list(checkpointed.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in checkpointed.named_modules()]
    checkpointed.load_state_dict(plain.state_dict())


class Counting(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "num_blocks", "products", "attentions", "activations"),
    [("none", None, 0, 0, 0), ("selective", None, 0, 0, 3), ("full", None, 3 * 6, 3, 3), ("full", 2, 2 * 6, 2, 2)],
)
def test_what_runs_twice(mode, num_blocks, products, attentions, activations) -> None:
    """A block has six matrix products, one attention and one GELU; whatever runs more often ran again."""

    def counts(model: Transformer) -> dict[str, int]:
        ids = packed_batch()["input_ids"]
        loss = model(ids).sum()
        with Counting() as counting:
            torch.autograd.backward(loss)
        return counting.counts

    plain, checkpointed = network(dropout=0.0), network(dropout=0.0)
    apply_activation_checkpointing(checkpointed, mode, num_blocks)
    before, now = counts(plain), counts(checkpointed)

    def again(*names: str) -> int:
        return sum(now.get(name, 0) - before.get(name, 0) for name in names)

    # The very last product of a block that is run again is not needed: its result is not kept for anything.
    last = sum(1 for _ in range(num_blocks or 3)) if mode == "full" else 0
    assert again("addmm", "mm") == products - last
    assert again("_scaled_dot_product_flash_attention_for_cpu") == attentions
    assert again("gelu") == activations


def one_row(length: int = LENGTH) -> TensorBatch:
    batch = packed_batch(1)
    return TensorBatch({"input_ids": batch["input_ids"][:, :length]}, batch["labels"][:, :length], slice(None))


def test_bytes_that_are_kept_equal_a_count_by_hand() -> None:
    """Per token, D = 32, F = 128, H = 4, V = 61, in float32 numbers, for LayerNorm, GELU and no dropout."""
    found = measure_activations(Network(network(dropout=0.0), precision="fp32", device="cpu"), one_row(), 5)
    d_model, d_ff, heads, vocabulary = 32, 128, 4, 61
    # Two norms keep input, mean and 1 / deviation; then the two norms' results, q, k, v, the attention's result and
    # its sums of exponentials, and what goes into and comes out of GELU.
    block = 2 * (d_model + 2) + 2 * d_model + 3 * d_model + d_model + heads + 2 * d_ff
    # q, k, v, output, up and down projection, and the attention's result with its sums.
    products = 5 * d_model + d_ff + d_model + heads
    tokens = 5 * LENGTH
    assert found.block == tokens * block * 4
    assert found.products == tokens * products * 4
    assert found.block_input == tokens * d_model * 4
    # The final norm and token ids of eight bytes; the loss keeps the norm's result, which is not counted here.
    assert found.rest == pytest.approx(tokens * (d_model + 2 + 2) * 4, rel=0.01)
    parameters = sum(parameter.numel() for parameter in network().parameters())
    # Beside weights, gradients and two moments, the gradient of the head that the loss makes.
    assert found.fixed == 4 * 4 * parameters + 4 * vocabulary * d_model
    assert found.num_blocks == 3


def test_measuring_leaves_the_network_as_it_was() -> None:
    model = network(dropout=0.0)
    before = loss_and_gradients(model)[0]
    measure_activations(Network(model, precision="bf16", device="cpu"), one_row(), 5)
    assert "forward" not in vars(model.blocks[0])
    assert torch.equal(loss_and_gradients(model)[0], before)


# Fixed 950, three times the rest is 150, four blocks of 100: 1500. Selective keeps 50 of a block and full 10, and one
# block is whole while it is run again: 1600 - 50 n and 1600 - 90 n for n of them.
EXAMPLE = ActivationBytes(block=100, products=40, block_input=10, rest=50, fixed=950, num_blocks=4)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1500, ("none", 0)),
        (1499, ("selective", 3)),
        (1450, ("selective", 3)),
        (1400, ("selective", 4)),
        (1399, ("full", 3)),
        (1240, ("full", 4)),
        (1239, None),
    ],
)
def test_the_cheapest_mode_that_fits_is_chosen_with_the_fewest_blocks(budget, expected) -> None:
    assert EXAMPLE.cheapest(budget) == expected


def test_auto_becomes_a_mode_and_a_number_of_blocks_and_nothing_else_changes() -> None:
    config = TrainingConfig(activation_checkpointing="auto", memory_budget=1.45e-6)
    resolved = resolve_activation_checkpointing(config, lambda: EXAMPLE, "cpu")
    assert (resolved.activation_checkpointing, resolved.checkpointed_blocks) == ("selective", 3)
    assert resolved.replace(activation_checkpointing="auto", checkpointed_blocks=None, memory_budget=1.45e-6) == config
    assert resolve_activation_checkpointing(resolved, lambda: pytest.fail("measured again"), "cpu") == resolved
    roomy = resolve_activation_checkpointing(config.replace(memory_budget=None), lambda: EXAMPLE, "cpu")
    assert (roomy.activation_checkpointing, roomy.checkpointed_blocks) == ("none", None)


def test_a_budget_that_nothing_fits_is_refused() -> None:
    config = TrainingConfig(activation_checkpointing="auto", memory_budget=1e-6)
    with pytest.raises(ConfigError, match=r"about 0\.00 GB .* budget is 0\.00 GB .* training\.micro_batch_size"):
        resolve_activation_checkpointing(config, lambda: EXAMPLE, "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_budget": 1.0}, "memory_budget = 1.0 is for activation_checkpointing = auto"),
        ({"memory_budget": 1.0, "activation_checkpointing": "full"}, "is for activation_checkpointing = auto"),
        ({"checkpointed_blocks": 2}, "is for activation_checkpointing = selective or full, not none"),
        ({"checkpointed_blocks": 2, "activation_checkpointing": "auto"}, "selective or full, not auto"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.checkpointed_blocks = 4, but the network has 3"):
        apply_activation_checkpointing(network(), "full", 4)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What other tests compiled counts towards a limit, and so does what this one does."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_compiled_as_one_graph_it_gives_the_same_loss(mode) -> None:
    plain, checkpointed = network(dropout=0.0), network(dropout=0.0)
    apply_activation_checkpointing(checkpointed, mode)
    ids = packed_batch()["input_ids"]
    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    results = []
    for network_, model in ((plain, plain), (checkpointed, compiled)):
        logits = model(ids)
        gradients = torch.autograd.grad(logits.square().sum(), list(network_.parameters()))
        results.append((logits.detach(), *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
