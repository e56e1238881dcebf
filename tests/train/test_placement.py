"""What a training step runs on: a working copy in bfloat16, float32 weights behind it, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, ModelConfig, Transformer, build_model
from sheepop.model.probe import record, watch
from sheepop.train import TrainingConfig
from sheepop.train.objective import NextToken, StepLoss
from sheepop.train.placement import OneDevice, clip_gradients
from sheepop.train.source import PreparedStep

from .runs import gradients_of

V, T = 23, 16


class Rows:
    """Random rows, some labels missing, and a document boundary in every second one."""

    num_samples, max_length = 1000, T

    def batch(self, sample_indices: np.ndarray) -> Batch:
        parts = [np.random.default_rng(int(index)).integers(0, V, T + 1) for index in sample_indices]
        tokens = np.stack(parts)
        labels = tokens[:, 1:].copy()
        labels[:, 5] = IGNORE_INDEX
        positions = np.broadcast_to(np.arange(T), labels.shape).copy()
        documents = np.zeros_like(labels)
        documents[::2, 9:] = 1
        positions[::2, 9:] -= 9
        return Batch(tokens[:, :-1].copy(), labels, positions, documents, has_boundaries=True)

    def token_range(self, sample: int) -> tuple[int, int]:
        return sample * T, (sample + 1) * T


def make_model(position_encoding: str = "rope", *, tied: bool = True, convolution: int | None = None) -> Transformer:
    config = ModelConfig(
        vocab_size=V,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=T,
        position_encoding=position_encoding,  # type: ignore[arg-type]
        norm="rmsnorm" if position_encoding == "rope" else "layernorm",
        activation="swiglu" if position_encoding == "rope" else "gelu",
        dropout=0.0,
        tie_weights=tied,
        short_convolution=convolution,
    )
    return build_model(config, 0)


def prepared(rows: int, micro: int) -> PreparedStep:
    return PreparedStep.of(Rows().batch(np.arange(rows)), micro, NextToken(), device="cpu")


def step(model: Transformer, precision: str, micro: int = 6, *, compiled: bool = False) -> StepLoss:
    network = OneDevice(model, precision=precision, device="cpu", compiled=compiled)
    return gradients_of(network, NextToken(), prepared(6, micro))


def expected_gradients(model: Transformer) -> tuple[float, dict[str, torch.Tensor]]:
    """By float64 over whole logits and torch's own loss."""
    exact = Transformer(model.config).double()
    exact.load_state_dict(model.state_dict())
    batch = Rows().batch(np.arange(6))
    logits = exact(
        torch.from_numpy(batch.input_ids),
        positions=torch.from_numpy(batch.positions),
        document_ids=torch.from_numpy(batch.document_ids),
    )
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    return loss.item(), {name: parameter.grad.to_dense() for name, parameter in exact.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position_encoding", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_gradients_arrive_in_the_float32_weights(
    precision: str, tolerance: float, position_encoding: str, tied: bool
) -> None:
    model = make_model(position_encoding, tied=tied)
    loss, gradients = expected_gradients(model)
    _, found = step(model, precision).means()
    assert found == pytest.approx(loss, rel=tolerance / 10)
    # A gradient that is zero by symmetry (a key's bias) is compared with what the others are.
    total = torch.nn.utils.get_total_norm(gradients.values())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert not parameter.grad.is_sparse
        error = (parameter.grad.double() - gradients[name]).norm()
        assert error < tolerance * (gradients[name].norm() + 0.05 * total), name


# Parts whose weights are near zero, no matrices, or computed in float32 inside of a network in bfloat16.
AXES: dict[str, dict[str, Any]] = {
    "experts": {"experts": {"count": 4, "shared": 1}},
    "experts without biases": {"experts": {"count": 4, "scores": "sigmoid"}, "bias": False, "activation": "swiglu"},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "zero-centred norms": {"norm": "rmsnorm_zero_centered", "norm_position": "sandwich", "qk_norm": "head"},
    "soft caps": {"attention_soft_cap": 5.0, "logit_soft_cap": 2.0, "tie_weights": False},
    "alibi": {"position_encoding": "alibi", "value_head_dim": 16},
    "n-grams": {"ngrams": {"orders": (2, 3), "rows": 40}, "short_convolution": 3},
    "muP": {"initialization": "mup", "mup_base_d_model": 8},
}


def drawn(**settings: Any) -> Transformer:
    """A network of which no vector is 0, and whose router chooses by its balance, which no rounding can turn."""
    sizes = {"vocab_size": V, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": T, "dropout": 0.0}
    model = build_model(ModelConfig(**{**sizes, "position_encoding": "rope", **settings}), 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for mixture in model.mixtures.values():
            mixture.router.balance += torch.tensor([0.0, 9.0, 6.0, 3.0])
    return model


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_every_axis_trains_on_the_working_copy(precision: str, tolerance: float, axis: str) -> None:
    model = drawn(**AXES[axis])
    loss, gradients = expected_gradients(model)
    _, found = step(model, precision).means()
    assert found == pytest.approx(loss, rel=tolerance / 20)
    total = torch.nn.utils.get_total_norm(gradients.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.to_dense().double() - gradients[name]).norm()
        assert error < tolerance * (gradients[name].norm() + 0.02 * total), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_are_those_of_the_model(precision: str) -> None:
    """What training moves without a gradient, the balance of a router, is one tensor for both; in full precision."""
    model = drawn(experts={"count": 4})
    network = OneDevice(model, precision=precision, device="cpu")
    shared = dict(network.modules.named_buffers())
    for name, buffer in model.named_buffers():
        assert shared[name] is buffer
        assert buffer.dtype == torch.float32
    model.blocks[0].feed_forward.router.balance[2] += 100.0
    network.begin_step()
    batch = torch.from_numpy(Rows().batch(np.arange(2)).input_ids)
    assert network.run({"input_ids": batch}).routings[0].counts[2] == batch.numel()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_tokens_go_to_the_experts_that_the_float32_router_chooses(precision: str) -> None:
    """Routers whose rows differ by less than bfloat16 can tell: rounded, they would score all experts alike."""
    model = drawn(experts={"count": 4, "per_token": 2})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mixture in model.mixtures.values():
            mixture.router.balance.zero_()
            shared = torch.randn(1, 32, generator=generator).bfloat16().float().abs() + 0.5
            mixture.router.weight.copy_(shared * (1 + torch.randn(4, 32, generator=generator) * 2e-4))
    network = OneDevice(model, precision=precision, device="cpu")
    network.begin_step()
    seen: list[torch.Tensor] = []
    batch = torch.from_numpy(Rows().batch(np.arange(6)).input_ids)
    with watch(network.modules, {"blocks.*.feed_forward_input": seen.append}), network.arithmetic():
        routings = network.run({"input_ids": batch}).routings
    assert len(routings) == 2
    for routing, entering, mixture in zip(routings, seen, model.mixtures.values(), strict=True):
        logits = entering.detach().flatten(0, 1).double() @ mixture.router.weight.double().T
        assert torch.equal(routing.chosen, logits.topk(2).indices)
        rounded = entering.detach().flatten(0, 1).double() @ mixture.router.weight.bfloat16().double().T
        assert not torch.equal(routing.chosen, rounded.topk(2).indices)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_add_up(precision: str) -> None:
    whole, cut = make_model(), make_model()
    one, other = step(whole, precision), step(cut, precision, micro=2)
    assert other.num_tokens == one.num_tokens == 6 * (T - 1)
    assert other.means() == pytest.approx(one.means(), rel=1e-4)
    for parameter, same in zip(whole.parameters(), cut.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        error = (parameter.grad - same.grad).norm() / parameter.grad.norm()
        assert error < (1e-5 if precision == "fp32" else 0.02)


def test_a_token_that_occurs_often_gets_the_whole_of_its_gradient() -> None:
    """Summed in bfloat16 a thousand equal parts would stop growing at 256 of them."""
    config = ModelConfig(vocab_size=4, d_model=8, num_layers=1, num_heads=1, max_seq_len=1024, dropout=0.0)
    model = build_model(config, 0)
    network = OneDevice(model, precision="bf16", device="cpu")
    ids = torch.ones(1, 1024, dtype=torch.long)
    network.begin_step()
    embedded = network.modules.embedding(ids)
    model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)
    torch.autograd.backward(embedded.float().sum())
    assert embedded.dtype == torch.bfloat16
    assert model.embedding.weight.grad.tolist() == [[0.0] * 8, [1024.0] * 8, [0.0] * 8, [0.0] * 8]


def test_the_working_copy_follows_the_weights_from_step_to_step() -> None:
    model = make_model()
    network = OneDevice(model, precision="bf16", device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    batch = torch.from_numpy(Rows().batch(np.arange(2)).input_ids)
    network.begin_step()
    with torch.no_grad():
        hidden = network.hidden_states({"input_ids": batch})
        rounded = Transformer(model.config)
        rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
        expected = rounded.hidden_states(batch)
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - expected).norm() / expected.norm() < 0.02
    assert network.head.cast is not None
    assert torch.equal(network.head.cast, model.lm_head.weight.bfloat16())


def test_in_float32_the_weights_are_shared_and_not_copied() -> None:
    model = make_model()
    network = OneDevice(model, precision="fp32", device="cpu")
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in network.modules.parameters()} == own
    assert network.head.weight is model.lm_head.weight
    assert network.head.cast is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gradients_of_a_step_are_its_own_whatever_memory_they_are_made_in(precision: str) -> None:
    """Those of a step after another equal those of a first one."""

    def gradients(*rows: int) -> list[torch.Tensor]:
        model = make_model()
        network = OneDevice(model, precision=precision, device="cpu")
        for count in rows:
            gradients_of(network, NextToken(), prepared(count, 2))
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    alone = gradients(6)
    assert len(alone) == len(list(make_model().parameters()))
    assert all(torch.equal(*pair) for pair in zip(gradients(4, 6), alone, strict=True))


def test_the_rows_of_a_tied_embedding_make_a_gradient_without_the_output_projection() -> None:
    model = make_model()
    network = OneDevice(model, precision="fp32", device="cpu")
    torch.autograd.backward(network.modules.embedding(torch.tensor([[1, 3, 3]])).sum())
    expected = torch.zeros(V, 32)
    expected[1], expected[3] = 1.0, 2.0
    assert model.embedding.weight.grad is not None
    assert torch.equal(model.embedding.weight.grad, expected)


def test_a_change_beside_the_embedding_learns_in_every_precision() -> None:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for precision in ("fp32", "bf16"):
        model = make_model(tied=False)
        add_lora(model, LoraConfig(rank=2, targets=("embedding",)))
        change = model.get_submodule("embedding.changes.default")
        change.get_parameter("down").data.normal_(generator=torch.Generator().manual_seed(1))
        step(model, precision)
        found[precision] = {name: each.grad for name, each in change.named_parameters() if each.grad is not None}
    assert found["fp32"].keys() == found["bf16"].keys() == {"down", "up"}
    for name, gradient in found["fp32"].items():
        assert (found["bf16"][name] - gradient).norm() < 0.05 * gradient.norm()


def test_the_objective_and_the_plain_loss_are_told_apart() -> None:
    model = make_model()
    network = OneDevice(model, precision="fp32", device="cpu")
    objective = NextToken.configured(TrainingConfig(z_loss=0.5, label_smoothing=0.1))
    losses = gradients_of(network, objective, prepared(4, 2))
    minimised, plain = losses.means()
    model.zero_grad()
    same, without = gradients_of(network, NextToken(), prepared(4, 2)).means()
    assert plain == pytest.approx(without, rel=1e-6)
    assert same == without
    # The logits of a fresh network are close to equal: the first term is about half of ln(V) squared.
    assert minimised - plain == pytest.approx(0.5 * np.log(V) ** 2, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_gives_the_same_bits_again_under_deterministic_algorithms(precision: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        gradients = []
        for _ in range(2):
            model = make_model()
            step(model, precision, micro=3)
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(("precision", "convolution"), [("fp32", None), ("bf16", None), ("fp32", 3)])
def test_compiled_blocks_share_one_compilation_and_leave_the_model_as_it_is(
    precision: str, convolution: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compilations.append(len(inputs))
        return graph.forward

    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_in_place(self, backend=count))
    torch._dynamo.reset()
    model, plain = make_model(convolution=convolution), make_model(convolution=convolution)
    found = step(model, precision, compiled=True).means()
    assert len(compilations) == 1
    assert found == step(plain, precision).means()
    for parameter, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        # Documents take another form of attention where blocks are compiled, which rounds otherwise.
        tolerance = 1e-2 if precision == "bf16" else 1e-5
        assert (parameter.grad - same.grad).norm() <= tolerance * same.grad.norm()
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    assert len(compilations) == 1


def with_gradient(values: list[float]) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_clipping_by_global_norm_gives_the_worked_values() -> None:
    parameters = [with_gradient([0.5]), with_gradient([0.8, 1.2])]
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx(1.526434, abs=1e-6)
    clipped = torch.cat([parameter.grad for parameter in parameters])
    assert clipped.tolist() == pytest.approx([0.327561, 0.524097, 0.786146], abs=1e-6)


def test_a_small_gradient_is_left_as_it_is() -> None:
    parameter = with_gradient([0.3, 0.4])
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])


def test_sparse_gradients_are_clipped_with_the_others() -> None:
    """The rows of a sparse gradient that was added up twice count as their sum: norm 13 of (3, 4) and (0, 12)."""
    dense, table = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(5, 2))
    dense.grad = torch.tensor([3.0, 4.0])
    rows = torch.tensor([[3, 3]])
    table.grad = torch.sparse_coo_tensor(rows, torch.tensor([[0.0, 5.0], [0.0, 7.0]]), (5, 2), check_invariants=True)
    assert clip_gradients([dense, table], 6.5).item() == pytest.approx(13.0)
    assert dense.grad.tolist() == pytest.approx([1.5, 2.0])
    assert table.grad.to_dense()[3].tolist() == pytest.approx([0.0, 6.0])
    assert table.grad.to_dense().count_nonzero() == 1


def test_without_a_maximum_the_norm_is_measured_only() -> None:
    parameter = with_gradient([30.0, 40.0])
    assert clip_gradients([parameter], None).item() == pytest.approx(50.0)
    assert parameter.grad.tolist() == [30.0, 40.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_who_watches_the_model_sees_what_trains(precision: str) -> None:
    """The steps run on a copy of the model; what its probes show there is the numbers of that step."""
    model = make_model()
    placement = OneDevice(model, precision=precision, device="cpu")
    seen: list[torch.Tensor] = []
    with watch(model, {"blocks.0.feed_forward_input": seen.append}):
        gradients_of(placement, NextToken(), prepared(6, 6))
    (value,) = seen
    assert value.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert value.requires_grad
    batch = Rows().batch(np.arange(6))
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs().items()}
    with record(model, ["blocks.0.feed_forward_input"]) as own, torch.no_grad():
        model.hidden_states(**inputs)
    exact = own["blocks.0.feed_forward_input"]
    torch.testing.assert_close(value.float(), exact, atol=0.05 if precision == "bf16" else 0.0, rtol=0)


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_what_samples_has_the_weights_of_steps_and_no_copy_of_them(kind: str) -> None:
    model = make_model(tied=kind != "untied").requires_grad_(True)
    if kind == "lora":
        add_lora(model, LoraConfig(rank=2))
    network = OneDevice(model, precision="bf16", device="cpu")
    ids = torch.from_numpy(Rows().batch(np.arange(2)).input_ids)
    with network.sampling() as sampled:
        pass
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 8
        with network.sampling() as again:
            assert again is sampled
            assert {weight.dtype for weight in again.parameters()} == {torch.bfloat16}
            expected = network.modules.eval().hidden_states(ids)
            torch.testing.assert_close(again.hidden_states(ids), expected, rtol=0, atol=0)
    own = {weight.data_ptr() for weight in (*network.modules.parameters(), *model.parameters())}
    own |= {cast.data_ptr() for cast in network._working}
    assert {weight.data_ptr() for weight in sampled.parameters()} <= own
    exact = OneDevice(make_model(), precision="fp32", device="cpu")
    with exact.sampling() as whole:
        assert whole is exact.model
