"""Activation checkpointing changes memory and time, and not one bit of a number."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.errors import ConfigError
from sheepop.core.random import seed_torch
from sheepop.jobs.run.step_memory import Adapting
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.accounting import saved_activations
from sheepop.model.accounting.cost import TrainingBytes, num_parameters, training_bytes
from sheepop.model.accounting.live_bytes import LiveBytes
from sheepop.model.accounting.saved_activations import Activations, BlockBytes, count_activations, count_going_back
from sheepop.model.logits import logits_bytes
from sheepop.model.loss import cross_entropy_sum, linear_cross_entropy
from sheepop.train import TrainingConfig, build_evaluation_weights, build_optimizers
from sheepop.train.activation_checkpointing import (
    StepBytes,
    apply_activation_checkpointing,
    resolve_activation_checkpointing,
    step_bytes,
)
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.placement import OneDevice

from ..model.architectures import ARCHITECTURES

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


def test_bytes_that_are_kept_equal_a_count_by_hand() -> None:
    """Per token, D = 32, F = 128, H = 4, in float32 numbers, for LayerNorm, GELU and no dropout."""
    found = count_activations(network(dropout=0.0).config, 5, LENGTH)
    d_model, d_ff, heads, tokens = 32, 128, 4, 5 * LENGTH
    # Two norms keep input, mean and 1 / deviation; then the two norms' results, q, k, v, the attention's result and
    # its sums of exponentials, and what goes into and comes out of GELU.
    block = 2 * (d_model + 2) + 2 * d_model + 3 * d_model + d_model + heads + 2 * d_ff
    # q, k, v, output, up and down projection, and the attention's result with its sums.
    products = 5 * d_model + d_ff + d_model + heads
    assert found.blocks == (BlockBytes(tokens * block * 4, tokens * products * 4),) * 3
    assert found.block_input == tokens * d_model * 4
    # Input, mean and 1 / deviation of the final norm, and its result; token ids of eight bytes.
    assert found.rest == tokens * (2 * d_model + 2 + 2) * 4
    assert found.total() == found.rest + 3 * tokens * block * 4
    assert found.total("full") == found.rest + 3 * found.block_input
    assert found.total("selective", 1) == found.rest + tokens * (d_model + products + 2 * block) * 4


class Alive(TorchDispatchMode):
    """The bytes of everything that was computed within it and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.freeze()  # what is there already needs no look when garbage is collected below

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for result in found if isinstance(found, tuple | list) else (found,):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return found

    def num_bytes(self, but: torch.nn.Module) -> int:
        """All but the weights of a network, of which some may have been looked at in another shape."""
        gc.collect()
        weights = {tensor.untyped_storage()._cdata for tensor in (*but.parameters(), *but.buffers())}
        alive = {key: size for key, (storage, size) in self._storages.items() if not storage.expired()}
        return sum(size for key, size in alive.items() if key not in weights)


FEW = ("sheepop", "bloom", "gemma", "deepseek")


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in ARCHITECTURES), *itertools.product(FEW, ("bf16", "fp16"))],
)
def test_after_a_forward_pass_as_many_bytes_are_alive_as_were_counted(name: str, precision: str) -> None:
    config = ARCHITECTURES[name]
    counted = count_activations(config, 3, 12, precision=precision)
    for mode, num_blocks in (("none", None), ("selective", None), ("full", None), ("full", 2)):
        model = build_model(config, 0).train()
        apply_activation_checkpointing(model, mode, num_blocks)
        taken = OneDevice(model, precision=precision, device="cpu")
        taken.begin_step()
        ids = torch.arange(3 * 12).view(3, 12)
        inputs = {"input_ids": ids}
        if config.architecture == "encoder_decoder":
            inputs["source_ids"] = ids
        with Alive() as alive, taken.arithmetic():
            outputs = taken.run(inputs)
        # The token ids are kept too, and were there before.
        assert outputs is not None
        assert alive.num_bytes(but=taken.modules) == counted.total(mode, num_blocks) - ids.nbytes, mode


@pytest.mark.parametrize("name", FEW)
def test_going_back_through_blocks_takes_the_bytes_that_were_counted(name: str) -> None:
    """Through all of them, with gradients let go at once: by then nothing is kept of those behind."""
    config = ARCHITECTURES[name]
    kept, back = count_activations(config, 3, 12), count_going_back(config, 3, 12)
    blocks = [block.everything for block in kept.blocks]
    expected = max(sum(blocks[: layer + 1]) + taken for layer, taken in enumerate(back))
    model = build_model(config, 0).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with LiveBytes() as live:
        hidden_BTD = model.run(torch.arange(3 * 12).view(3, 12)).hidden_states
        weights = live.now - kept.total()
        live.forget_peak()
        torch.autograd.backward(hidden_BTD, torch.ones_like(hidden_BTD))
    # The final norm, and the hidden states, which are still there.
    assert expected <= live.peak - weights <= expected + kept.rest + 2 * hidden_BTD.nbytes


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_routing_that_is_held_does_not_hold_a_block_that_was_run_again(mode: str) -> None:
    """Behind the backward pass only what was returned is left, and the gradients."""
    model = build_model(ARCHITECTURES["deepseek"], 0).train()
    apply_activation_checkpointing(model, mode)
    with Alive() as alive:
        outputs = model.run(torch.arange(3 * 12).view(3, 12))
        losses = [routing.load_balancing_loss() for routing in outputs.routings]
        torch.autograd.backward(outputs.hidden_states.square().sum() + torch.stack(losses).sum())
        del losses
    held = (outputs.hidden_states, *itertools.chain(*outputs.routings))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert alive.num_bytes(but=model) == sum(tensor.nbytes for tensor in (*held, *gradients))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma", {"attention_backend": "eager"}),
        ("mistral", {"attention_backend": "sdpa"}),
        ("mistral", {"value_head_dim": 8}),
    ],
)
def test_where_blocks_can_be_computed_only_attention_that_takes_them_is_counted_as_such(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with the kernel for blocks: who asks for another form of attention keeps what that form keeps."""
    config = ARCHITECTURES[name].replace(**{"head_dim": 16, **settings})
    expected = count_activations(config, 3, 12)
    saved_activations._counted.cache_clear()
    monkeypatch.setattr(saved_activations, "has_block_kernel", lambda device, head_dim: head_dim >= 16)
    assert count_activations(config, 3, 12) == expected


@pytest.mark.parametrize("name", ["sheepop", "llama", "deepseek", "switch"])
@pytest.mark.parametrize(
    ("optimizer", "precision", "averaged"),
    [(name, "fp32", False) for name in OPTIMIZER_NAMES] + [("adamw", "bf16", True), ("muon", "fp16", False)],
)
def test_weights_gradients_and_state_take_the_bytes_that_are_allocated(
    name: str, optimizer: str, precision: str, averaged: bool
) -> None:
    schedule = "constant" if optimizer == "schedule_free_adamw" else "cosine"
    training = TrainingConfig(optimizer=optimizer, schedule=schedule, ema_decay=0.9 if averaged else None)
    model = build_model(ARCHITECTURES[name], 0)
    optimizers = build_optimizers(model, training)
    evaluation = build_evaluation_weights(model, optimizers, training)
    taken = OneDevice(model, precision=precision, device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
    states = [state for each in optimizers for state in each.state.values()]
    found = training_bytes(model.config, optimizer, precision, averaged=averaged)
    assert found == TrainingBytes(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        gradients=sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        optimizer=sum(slot.nbytes for state in states for slot in state.values() if isinstance(slot, Tensor)),
        working_copy=sum(weight.nbytes for weight in taken._working),
        average=sum(weight.nbytes for weight in vars(evaluation).get("_averages", [])),
    )
    assert found.total == sum(dataclasses.astuple(found))


def test_a_step_needs_its_state_its_activations_and_the_gradient_of_the_head() -> None:
    config = ARCHITECTURES["llama"]
    training = TrainingConfig(optimizer="lion", ema_decay=0.9)
    found = step_bytes(config, training, "bf16", 3, 12, "cpu")
    assert found.activations == count_activations(config, 3, 12, precision="bf16")
    weights = 4 * num_parameters(config)
    # Weights, gradients, momentum and average; in two bytes all weights but the embedding.
    assert found.state == 4 * weights + (weights // 4 - 50 * 32) * 2
    # The gradient of the head, and the logits of 36 tokens.
    assert found.loss == 4 * 50 * 32 + 36 * 50 * 2
    # Micro-batches add to one gradient of a large head in place. 32 rows of its logits are 128 MiB: two chunks of 18.
    large = step_bytes(config.replace(vocab_size=2**21), training, "bf16", 3, 12, "cpu")
    assert large.loss == 18 * 2**21 * 2
    # SGD moves a large head some rows at a time, whose gradient never exists as a whole.
    training, wide = training.replace(optimizer="sgd", ema_decay=None), config.replace(vocab_size=2**21)
    moved = step_bytes(wide, training, "fp32", 3, 12, "cpu")
    assert moved.state == 3 * 4 * num_parameters(wide) - 4 * 2**21 * 32
    # Three chunks of 12 rows of logits, and 320 MiB, which are 40 rows of their gradients.
    assert moved.loss == (12 + 40) * 2**21 * 4


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_a_frozen_head_needs_logits_of_a_part_of_the_vocabulary(target: str) -> None:
    config = ARCHITECTURES["llama"].replace(vocab_size=2**16, tie_weights=False)
    lora = Adapting(LoraConfig(targets=(target,)))
    found = step_bytes(config, TrainingConfig(), "fp32", 3, 12, "cpu", lora).loss
    network, largest = build_model(config, seed=0), [0]
    lora(network)

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            shared = {each.untyped_storage().data_ptr() for each in network.parameters()}
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in shared:
                largest[0] = max(largest[0], made.untyped_storage().nbytes())
            return made

    ids = torch.arange(36).view(3, 12)
    hidden = network.hidden_states(ids)
    with Largest():
        network.lm_head.cross_entropy(hidden, ids.roll(1)).objective.backward()
    assert largest[0] <= found <= 4 * largest[0]


def test_the_loss_holds_no_more_logits_than_a_chunk() -> None:
    class Products(TorchDispatchMode):
        sizes: list[int] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) and found.shape[1] == 40_000:
                self.sizes.append(found.nbytes)
            return found

    with Products() as products:
        hidden, labels = torch.zeros(1000, 2), torch.zeros(1000, dtype=torch.long)
        linear_cross_entropy(hidden, torch.zeros(40_000, 2), labels)
    assert logits_bytes(1000, 40_000, torch.float32, "cpu") == max(products.sizes) < 128 << 20
    assert len(products.sizes) == 2


# State and loss 950, twice the rest is 150, four blocks of 100: 1500. Selective keeps 50 of a block and full 10, and
# one block is whole while it is run again: 1600 - 50 n and 1600 - 90 n for n of them.
EXAMPLE = StepBytes(Activations((BlockBytes(100, 40),) * 4, block_input=10, masks=0, rest=75), loss=200, state=750)


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
    with pytest.raises(ConfigError, match=r"training\.checkpointed_blocks = 4, but the network has only 3 blocks"):
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
