"""Probes: where they are, what they show, what a change at one of them does, and that they cost nothing when off."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.attention.fused import FusedAttention
from sheepop.model.block import BlockInputs
from sheepop.model.probe import Probe, named_probes, record, watch

from .slow_network import SlowNetwork
from .test_network import DELTA, GEMMA4

IDS = torch.randint(0, 19, (1, 6), generator=torch.Generator().manual_seed(4))
NETWORKS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "rope, sandwich, window": {
        "position_encoding": "rope",
        "norm_position": "sandwich",
        "sliding_window": 3,
        "num_kv_heads": 2,
        "qk_norm": "head",
        "activation": "swiglu",
        "embedding_norm": True,
    },
    "alibi, post-norm, sinks": {
        "position_encoding": "alibi",
        "norm_position": "post",
        "attention_sinks": True,
        "logit_soft_cap": 2.0,
        "value_head_dim": 5,
    },
    "latents": {
        "position_encoding": "rope",
        "latent_attention": {"kv_rank": 5, "q_rank": 6, "rope_head_dim": 2},
        "value_head_dim": 3,
    },
    "convolution and delta net": {
        "num_layers": 3,
        "attention_output_gate": True,
        "gated_convolution": {"layers": [0]},
        "gated_delta_net": {**DELTA, "layers": [2]},
        "experts": {"count": 4, "shared": 1, "shared_gate": True, "layers": [2]},
    },
    "like gemma 4": {
        **GEMMA4,
        "experts": None,
        "num_layers": 4,
        "sliding_layers": [0, 2],
        "shared_kv_layers": 2,
        "layer_d_ff": None,
    },
    "parallel, experts, soft cap": {
        "position_encoding": "learned",
        "parallel_residual": True,
        "attention_soft_cap": 1.0,
        "activation": "swiglu",
        "experts": {"count": 4, "shared": 1, "layers": [1]},
    },
}


def network(**settings: Any) -> Transformer:
    sizes = {"vocab_size": 19, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24, "max_seq_len": 8}
    model = build_model(ModelConfig(**{**sizes, "dropout": 0.0, **settings}), seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.fixture(params=NETWORKS, scope="module")
def model(request: pytest.FixtureRequest) -> Transformer:
    return network(**NETWORKS[request.param])


def of_row(name: str, value: Tensor) -> np.ndarray:
    """A recorded tensor as the slow network has it: without the batch, which the rows of experts never had."""
    rows_only = ".experts." in name or ".router." in name or name.endswith(".order")
    return (value if rows_only else value[0]).numpy()


# The points at which a network is to be seen, and the probes of layer 0 that show them.
POINTS = {
    "embedding": "embedded",
    "position": "positioned",
    "norm before attention": "blocks.0.attention_input",
    "q": "blocks.0.attention.q",
    "k": "blocks.0.attention.k",
    "v": "blocks.0.attention.v",
    "rotated q": "blocks.0.attention.rotated_q",
    "rotated k": "blocks.0.attention.rotated_k",
    "scores": "blocks.0.attention.scores",
    "weights": "blocks.0.attention.weights",
    "head outputs": "blocks.0.attention.head_outputs",
    "attention out": "blocks.0.attention_output",
    "residual behind attention": "blocks.0.middle",
    "norm before the feed-forward network": "blocks.0.feed_forward_input",
    "feed-forward pre-activation": "blocks.0.feed_forward.pre_activation",
    "feed-forward activation": "blocks.0.feed_forward.hidden",
    "feed-forward out": "blocks.0.feed_forward_output",
    "residual behind the block": "blocks.0.output",
    "final norm": "final",
    "logits": "logits",
}


# Those inside of a feed-forward layer of experts with gates.
EXPERT_POINTS = {
    "router's logits": "router.logits",
    "experts of a token": "router.chosen",
    "weights of these experts": "router.weights",
    "tokens of the experts' rows": "order",
    "gates before the activation": "experts.pre_activation",
    "what they are multiplied by": "experts.up",
    "hidden units": "experts.hidden",
    "sum of the routed experts": "routed_output",
    "output of the shared ones": "shared_output",
    "gates of the shared experts": "shared.pre_activation",
    "what those are multiplied by": "shared.up",
    "hidden units of the shared experts": "shared.hidden",
}


def test_every_point_that_matters_has_a_probe() -> None:
    probes = named_probes(network())
    assert set(POINTS.values()) == {name for name in probes if not name.startswith("blocks.1.")}
    assert len(probes) == len(set(map(id, probes.values())))
    of_experts = named_probes(network(**NETWORKS["parallel, experts, soft cap"]).blocks[1].feed_forward)
    assert set(EXPERT_POINTS.values()) == of_experts.keys()
    assert "blocks.1.feed_forward.up" in named_probes(network(activation="swiglu"))


def test_the_rows_of_experts_are_mapped_back_to_their_tokens() -> None:
    """By `order` alone: with it and the choices, the output of the experts is put together again."""
    model = network(**NETWORKS["parallel, experts, soft cap"])
    layer = model.blocks[1].feed_forward
    with record(model, ["blocks.1.feed_forward.*"]) as found_at:
        model(IDS)
    values = {name.removeprefix("blocks.1.feed_forward."): value for name, value in found_at.items()}
    chosen, weights = values["router.chosen"], values["router.weights"]
    expected = torch.zeros(6, 16, dtype=torch.float64)
    for place, hidden in zip(values["order"].tolist(), values["experts.hidden"], strict=True):
        token, choice = divmod(place, 2)
        expert = chosen[token, choice]
        found = layer.experts.down_proj[expert] @ hidden + layer.experts.down_bias[expert]
        expected[token] += weights[token, choice] * found.detach()
    torch.testing.assert_close(values["routed_output"][0], expected)


def test_recorded_values_are_those_of_the_slow_network_at_every_probe(model: Transformer) -> None:
    slow = SlowNetwork(model)
    slow.logits(IDS[0].tolist())
    with record(model, named_probes(model)) as values:
        model(IDS)
    assert values.keys() == slow.points.keys() == named_probes(model).keys()
    for name, value in values.items():
        assert not value.requires_grad
        np.testing.assert_allclose(of_row(name, value), slow.points[name], atol=1e-6, err_msg=name)


def test_a_change_at_any_probe_changes_what_follows_as_in_the_slow_network(model: Transformer) -> None:
    unchanged = model(IDS).detach()

    def scaled(value: Any) -> Any:
        # No norm takes this back, and a score of -inf stays one.
        return 0.9 * value - 0.4 * value.clip(-0.3, 0.3)

    # Whole numbers: the next expert of four for each choice, and the rows of the experts the other way round.
    others = {"chosen": lambda value: (value + 1) % 4, "order": lambda value: value[list(range(len(value)))[::-1]]}
    for name in named_probes(model):
        change = others.get(name.rpartition(".")[2], scaled)
        with watch(model, {name: change}):
            found = model(IDS).detach()
        expected = SlowNetwork(model, {name: change}).logits(IDS[0].tolist())
        np.testing.assert_allclose(found[0], expected, atol=1e-5, err_msg=name)
        assert not torch.allclose(found, unchanged, atol=1e-4), name


def test_nothing_is_seen_outside_of_the_context_and_no_bit_of_the_logits_changes(model: Transformer) -> None:
    before = model(IDS)
    with record(model, ["*"]) as values:
        model(IDS)
    kept = dict(values)
    assert torch.equal(model(IDS), before)
    assert values.keys() == kept.keys()
    assert all(values[name] is kept[name] for name in kept)
    assert not any(probe.observers for probe in named_probes(model).values())


def test_looking_without_touching_changes_no_bit() -> None:
    """Where scores and weights are not looked at, attention is computed as it always is."""
    model = network()
    seen: list[Tensor] = []
    names = [name for name in named_probes(model) if not name.endswith(("scores", "weights"))]
    before = model(IDS)
    with watch(model, dict.fromkeys(names, seen.append)):
        assert torch.equal(model(IDS), before)
    assert len(seen) == len(names)


def test_gradients_pass_a_probe_and_can_be_taken_at_it() -> None:
    model = network()
    held: list[Tensor] = []

    def hold(value: Tensor) -> None:
        value.retain_grad()
        held.append(value)

    with watch(model, {"blocks.0.output": hold}):
        model(IDS).sum().backward()
    assert held[0].grad is not None
    # Of a network cut in two there, the second half has the same gradient.
    later = held[0].detach().requires_grad_()
    with watch(model, {"blocks.0.output": lambda _: later}):
        model(IDS).sum().backward()
    torch.testing.assert_close(later.grad, held[0].grad)


def test_observers_are_called_in_order_and_each_is_forgotten_with_its_own_context() -> None:
    model = network()
    values: list[float] = []

    def double(value: Tensor) -> Tensor:
        values.append(value.abs().max().item())
        return 2 * value

    with watch(model, {"embedded": double}):
        with watch(model, {"embedded": double}):
            model(IDS)
        assert values[1] == 2 * values[0]
        model(IDS)
        assert len(values) == 3
    model(IDS)
    assert len(values) == 3


def test_two_threads_that_watch_one_network_see_each_their_own_pass() -> None:
    model = network()
    both_watch = threading.Barrier(2, timeout=30)

    def run(token: int) -> list[Tensor]:
        with watch(model, {"embedded": seen[token].append, "blocks.0.output": lambda x: token * x}):
            both_watch.wait()
            logits = model(torch.full((1, 3), token)).detach()
            both_watch.wait()
        return logits

    seen: dict[int, list[Tensor]] = {2: [], 3: []}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(seen, pool.map(run, seen), strict=True))
    for token, values in seen.items():
        (value,) = values
        assert torch.equal(value, model.embedding(torch.full((1, 3), token)) * model.embedding_scale)
        with watch(model, {"blocks.0.output": lambda x, token=token: token * x}):
            assert torch.equal(found[token], model(torch.full((1, 3), token)))


def test_a_copy_that_shares_the_weights_is_seen_through_the_probes_of_the_original() -> None:
    model = network()
    copied = copy.deepcopy(model)
    with record(model, ["blocks.1.output"]) as values:
        copied(2 * IDS % 19)
    expected = SlowNetwork(model)
    expected.logits((2 * IDS % 19)[0].tolist())
    np.testing.assert_allclose(values["blocks.1.output"][0], expected.points["blocks.1.output"], atol=1e-6)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_network_is_run_as_it_is_written_while_it_is_watched() -> None:
    model = network()
    expected = model(IDS)
    for block in model.blocks:
        block.compile(backend="eager")
    model(IDS)
    with record(model, named_probes(model)) as values:
        assert torch.equal(model(IDS), model.read_out(values["final"]))
    assert values.keys() == named_probes(model).keys()
    torch.testing.assert_close(model(IDS), expected)


@pytest.mark.usefixtures("nothing_compiled")
def test_contexts_that_end_in_another_order_leave_the_compiler_as_it_was() -> None:
    """Two threads may enter and leave in turn."""
    model, graphs = network(), 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    first, second = (watch(model, {"embedded": lambda value: None}) for _ in range(2))
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    contexts = [contextvars.copy_context() for _ in range(2)]
    contexts[0].run(first.__enter__)
    contexts[1].run(second.__enter__)
    contexts[0].run(first.__exit__, None, None, None)
    assert compiled(torch.ones(2)).sum() == 4
    assert graphs == 0
    contexts[1].run(second.__exit__, None, None, None)
    compiled(torch.ones(2))
    assert graphs == 1


def test_an_error_in_the_context_leaves_no_observer_behind() -> None:
    model = network()
    with pytest.raises(RuntimeError, match="stop here"), watch(model, {"*": lambda value: None}):
        raise RuntimeError("stop here")
    assert not any(probe.observers for probe in named_probes(model).values())


def test_a_name_that_no_probe_has_is_refused_with_the_nearest() -> None:
    with (
        pytest.raises(KeyError, match=r"no probe is named 'blocks.0.attention.score'.*blocks.0.attention.scores"),
        record(network(), ["blocks.0.attention.score"]),
    ):
        pass


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def captured(block: torch.nn.Module) -> list[str]:
    """The operations of each graph that the compiler takes from a block."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append("\n".join(f"{node.op} {node.target} {node.args}" for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    # Raises for a graph break.
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    compiled(torch.ones(1, 6, 16, dtype=torch.bfloat16), BlockInputs(FusedAttention(is_causal=True)))
    return graphs


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("settings", [{}, {"experts": {"count": 4, "shared": 1}}], ids=["plain", "experts"])
def test_probes_add_nothing_to_a_compiled_block(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    block = network(**settings).to(torch.bfloat16).blocks[0].train()
    with_probes = captured(block)
    monkeypatch.setattr(Probe, "__call__", lambda self, value: value)
    assert captured(block) == with_probes
    assert len(with_probes) == 1
