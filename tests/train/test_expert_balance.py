"""Training with experts: the losses of the routers, the biases that even out the loads, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.core.json_lines import read_json_lines
from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, LossSums, ModelConfig, Transformer, build_model
from sheepop.model.probe import watch
from sheepop.train import Trainer
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.objective import BalancedExperts, NextToken, StepLoss, with_experts
from sheepop.train.placement import Network, OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

from .runs import Killed, gradients_of

V, T, ROWS = 31, 12, 8
EXPERTS: dict[str, Any] = {"count": 4, "per_token": 2, "layers": (0, 2), "d_ff": 24}
MakeTrainer = Callable[..., Trainer]


def network(dropout: float = 0.0, **experts: Any) -> Transformer:
    sizes = {"vocab_size": V, "d_model": 16, "num_layers": 3, "num_heads": 2, "max_seq_len": T, "dropout": dropout}
    model = build_model(ModelConfig(**sizes, experts={**EXPERTS, **experts}), seed=2)
    with torch.no_grad():
        for mixture in model.mixtures.values():
            mixture.router.weight.mul_(30)  # as far apart as after some training
    return model


def rows(lost: tuple[int, ...] = (0, 1, 5, 17, 40, 41, 95)) -> Batch:
    """Two documents in every other row; the labels of some places do not count."""
    tokens = np.random.default_rng(3).integers(V, size=(ROWS, T + 1))
    labels = tokens[:, 1:].copy()
    labels.reshape(-1)[list(lost)] = IGNORE_INDEX
    positions = np.broadcast_to(np.arange(T), labels.shape).copy()
    documents = np.zeros_like(labels)
    documents[::2, 9:] = 1
    positions[::2, 9:] -= 9
    return Batch(tokens[:, :-1].copy(), labels, positions, documents, has_boundaries=True)


def step(model: Transformer, micro: int = ROWS, *, precision: str = "fp32", compiled: bool = False) -> StepLoss:
    objective = with_experts(NextToken(), model.config)
    prepared = PreparedStep.of(rows(), micro, objective, device="cpu")
    return gradients_of(OneDevice(model, precision=precision, device="cpu", compiled=compiled), objective, prepared)


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def slow_step(model: Transformer) -> tuple[Tensor, list[list[int]], dict[str, Tensor]]:
    """Objective, loads of each layer and gradients of a step, in float64, token after token."""
    exact = Transformer(model.config).double()
    exact.load_state_dict(model.state_dict())
    batch, experts = rows(), model.config.experts
    assert experts is not None
    seen: list[Tensor] = []
    with watch(exact, {"blocks.*.feed_forward.router.logits": seen.append}):
        logits = exact(
            torch.from_numpy(batch.input_ids),
            positions=torch.from_numpy(batch.positions),
            document_ids=torch.from_numpy(batch.document_ids),
        )
    labels = torch.from_numpy(batch.labels).flatten()
    counting = [place for place, label in enumerate(labels.tolist()) if label != IGNORE_INDEX]
    objective = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX)
    all_loads = []
    for layer_logits, mixture in zip(seen, exact.mixtures.values(), strict=True):
        loads = [0] * experts.count
        mean_probability = [torch.zeros(()).double() for _ in loads]
        squares = torch.zeros(()).double()
        for place in counting:
            terms = [torch.exp(logit) for logit in layer_logits[place]]
            total = sum(terms)
            squares = squares + torch.log(total) ** 2
            probabilities = [term / total for term in terms]
            sigmoids = [1 / (1 + torch.exp(-logit)) for logit in layer_logits[place]]
            scores = probabilities if experts.scores == "softmax" else sigmoids
            biased = [score.item() + bias.item() for score, bias in zip(scores, mixture.router.balance, strict=True)]
            for expert in sorted(range(experts.count), key=lambda e: -biased[e])[: experts.per_token]:
                loads[expert] += 1
            for expert, probability in enumerate(probabilities):
                mean_probability[expert] = mean_probability[expert] + probability / len(counting)
        balance = sum(experts.count * load / len(counting) * p for load, p in zip(loads, mean_probability, strict=True))
        added = experts.load_balancing_loss * balance + experts.router_z_loss * squares / len(counting)
        objective = objective + added / len(seen)
        all_loads.append(loads)
    objective.backward()
    return objective.detach(), all_loads, gradients(exact)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("per_token", [1, 3])
def test_a_step_adds_the_losses_of_the_routers_as_slow_loops_do(scores: str, per_token: int) -> None:
    model = network(scores=scores, per_token=per_token, load_balancing_loss=0.3, router_z_loss=0.2)
    with torch.no_grad():
        model.mixtures[2].router.balance.copy_(torch.tensor([0.05, -0.1, 0.0, 0.2]))
    objective, loads, expected = slow_step(model)
    found = step(model)
    assert found.means()[0] == pytest.approx(float(objective), rel=1e-6)
    assert found.measured["expert_loads"].tolist() == loads
    plain = network(scores=scores, per_token=per_token, load_balancing_loss=0.0, router_z_loss=0.0)
    plain.load_state_dict(model.state_dict())
    step(plain)
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm() + 1e-8, name
        if "router" in name:  # the added losses are no trifle there
            assert (gradients(plain)[name] - expected[name]).norm() > 0.1 * expected[name].norm(), name


def test_only_the_places_that_count_are_looked_at() -> None:
    """A micro-batch without a label adds nothing, and no NaN."""
    model = network()
    objective = with_experts(NextToken(), model.config)
    prepared = PreparedStep.of(rows(lost=tuple(range(2 * T))), 2, objective, device="cpu")
    found = gradients_of(OneDevice(model, precision="fp32", device="cpu"), objective, prepared)
    assert prepared.num_tokens == (ROWS - 2) * T
    assert found.measured["expert_loads"].sum(1).tolist() == [2 * (ROWS - 2) * T] * 2
    model.zero_grad()
    few = replace(prepared, micro_batches=prepared.micro_batches[1:])
    same = gradients_of(OneDevice(model, precision="fp32", device="cpu"), objective, few)
    assert found.means() == same.means()


@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (0.0, 0.2)])
@pytest.mark.parametrize("micro", [4, 1])
def test_cutting_a_step_changes_nothing_but_rounding_without_the_balancing_loss(micro: int, coefficients) -> None:
    balance, router_z = coefficients
    whole, cut = (network(load_balancing_loss=balance, router_z_loss=router_z) for _ in range(2))
    one, other = step(whole), step(cut, micro)
    assert other.means() == pytest.approx(one.means(), rel=1e-6)
    assert torch.equal(one.measured["expert_loads"], other.measured["expert_loads"])
    for name, gradient in gradients(whole).items():
        assert (gradient - gradients(cut)[name]).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_the_balancing_loss_of_a_cut_step_is_the_mean_of_its_parts_weighed_by_tokens() -> None:
    model = network(load_balancing_loss=1.0, router_z_loss=0.0)
    objective, parts, tokens = with_experts(NextToken(), model.config), [], []
    for start in (0, 4):
        half = PreparedStep.of(rows().rows(slice(start, start + 4)), 4, objective, device="cpu")
        found = gradients_of(OneDevice(model, precision="fp32", device="cpu"), objective, half)
        parts.append(found.measured["load_balancing_loss"].item() / half.num_tokens)
        tokens.append(half.num_tokens)
    assert tokens[0] != tokens[1]
    expected = sum(part * count for part, count in zip(parts, tokens, strict=True)) / sum(tokens)
    whole, cut = (step(model, micro).measured["load_balancing_loss"].item() / sum(tokens) for micro in (8, 4))
    assert cut == pytest.approx(expected, rel=1e-6)
    assert abs(cut - whole) > 1e-4


def test_biases_move_by_the_rate_towards_even_loads() -> None:
    model = network(bias_update_rate=0.25)
    objective = with_experts(NextToken(), model.config)
    # 16 choices of each layer: 4 are even.
    loads = torch.tensor([[7, 4, 5, 0], [4, 4, 4, 4]])
    for precision in ("fp32", "bf16"):
        objective.step_taken(
            OneDevice(model, precision=precision, device="cpu"), StepLoss(torch.zeros(2), 8, {"expert_loads": loads})
        )
    assert model.mixtures[0].router.balance.tolist() == [-0.5, 0.0, -0.5, 0.5]
    assert model.mixtures[2].router.balance.tolist() == [0.0] * 4


def test_loads_are_reported_relative_to_even_ones() -> None:
    objective = with_experts(NextToken(), network().config)
    measured = {
        "expert_loads": torch.tensor([[8, 0, 4, 4], [3, 5, 4, 4]]),
        "load_balancing_loss": torch.tensor(16.8),
        "router_z_loss": torch.tensor(4.0),
    }
    assert objective.metrics(StepLoss(torch.tensor([24.0, 16.0]), 8, measured)) == {
        "objective": 3.0,
        "load_balancing_loss": pytest.approx(2.1),
        "router_z_loss": 0.5,
        "expert_load_max": 2.0,
        "expert_load_min": 0.0,
        "expert_load_max_by_layer": [2.0, 1.25],
        "expert_load_min_by_layer": [0.0, 0.75],
    }


def test_without_experts_an_objective_stays_as_it_is() -> None:
    objective = NextToken()
    assert with_experts(objective, ModelConfig(vocab_size=V)) is objective
    assert isinstance(with_experts(objective, network().config), BalancedExperts)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_under_activation_checkpointing_a_step_is_the_same_and_counts_once(mode: str, dropout: float) -> None:
    plain, checkpointed = network(dropout), network(dropout)
    apply_activation_checkpointing(checkpointed, mode)
    torch.manual_seed(4)
    expected = step(plain)
    torch.manual_seed(4)
    found = step(checkpointed)
    assert found.means() == expected.means()
    assert torch.equal(found.measured["expert_loads"], expected.measured["expert_loads"])
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(checkpointed)[name]), name


@pytest.mark.parametrize("times", [0, 2])
def test_an_objective_that_does_not_run_the_network_once_is_refused(times: int) -> None:
    """The losses of the routers would be those of none, or of one of several passes."""

    class Several(NextToken):
        def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
            hidden = [network.run(batch.inputs).hidden_states for _ in range(times)]
            mean = torch.stack([*hidden, torch.zeros(*batch.labels.shape, 16)]).mean(0)
            return network.head.cross_entropy(mean, batch.labels, self.terms, batch.supervised)

    model = network()
    objective = with_experts(Several(), model.config)
    prepared = PreparedStep.of(rows(), ROWS, objective, device="cpu")
    with pytest.raises(RuntimeError, match=f"ran the network {times} times"):
        gradients_of(OneDevice(model, precision="fp32", device="cpu"), objective, prepared)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_with_experts_are_one_graph_and_give_the_same_step(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compile_in_place(self, backend="aot_eager", fullgraph=True)
    )
    torch._dynamo.reset()
    plain, compiled = network(), network()
    apply_activation_checkpointing(compiled, mode)
    expected, found = step(plain, 4), step(compiled, 4, compiled=True)
    assert found.means() == pytest.approx(expected.means(), rel=1e-6)
    assert torch.equal(found.measured["expert_loads"], expected.measured["expert_loads"])
    for name, gradient in gradients(plain).items():
        assert (gradient - gradients(compiled)[name]).norm() < 1e-5 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_run_with_the_biases_of_the_model(precision: str) -> None:
    """A bias that no score outweighs sends every token to its expert."""
    model = network(per_token=1, bias_update_rate=0.5)
    found = step(model, precision=precision)
    assert (found.measured["expert_loads"] > 0).sum() > 2
    for mixture in model.mixtures.values():
        mixture.router.balance[3] = 2.0
    found = step(model, precision=precision)
    assert found.measured["expert_loads"].tolist() == [[0, 0, 0, found.num_tokens]] * 2


RUN: dict[str, Any] = {
    "network": {"experts": {"count": 4, "per_token": 1, "bias_update_rate": 0.02, "load_balancing_loss": 0.0}},
    "max_steps": 9,
    "checkpoint_interval": 4,
}


def metrics(trainer: Trainer) -> list[dict[str, Any]]:
    timing = ("seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores")
    found = read_json_lines(trainer.checkpointer.run.metrics_file)[0]
    return [{key: row[key] for key in row if key not in timing} for row in found]


def assert_same(one: Trainer, other: Trainer) -> None:
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    assert metrics(one) == metrics(other)


@pytest.mark.parametrize("averaged", [None, 0.8])
def test_a_killed_run_goes_on_with_its_biases_bit_for_bit(make_trainer: MakeTrainer, averaged: float | None) -> None:
    unbroken = make_trainer("unbroken", ema_decay=averaged, **RUN)
    unbroken.run()
    killed = make_trainer("killed", ema_decay=averaged, **RUN)

    def die_at_six(step: int) -> list[dict[str, Any]]:
        if step == 6:
            raise Killed
        return []

    killed.sample = die_at_six
    with pytest.raises(Killed):
        killed.run()
    killed.checkpointer.close()
    resumed = make_trainer("killed", resume=True, ema_decay=averaged, **RUN)
    resumed.sample = unbroken.sample
    assert resumed.state.step == 5
    assert any(mixture.router.balance.any() for mixture in resumed.model.mixtures.values())
    resumed.run()
    assert_same(unbroken, resumed)


def test_computing_a_micro_batch_twice_counts_it_once(make_trainer: MakeTrainer) -> None:
    plain, verified = make_trainer("plain", **RUN), make_trainer("verified", verify_interval=1, **RUN)
    plain.run()
    verified.run()
    assert_same(plain, verified)


def test_biases_even_out_the_loads_of_a_router_that_prefers_an_expert(make_trainer: MakeTrainer) -> None:
    def loads(name: str, rate: float, num_steps: int) -> list[float]:
        experts = {"count": 4, "per_token": 1, "bias_update_rate": rate, "load_balancing_loss": 0.0}
        trainer = make_trainer(
            name,
            network={"experts": {**experts, "router_z_loss": 0.0}, "num_layers": 1},
            max_steps=num_steps,
            learning_rate=1e-5,
            eval_interval=60,
            checkpoint_interval=60,
            sample_interval=60,
        )
        with torch.no_grad():
            # What comes in has a mean, and the router likes that for one expert.
            trainer.model.blocks[0].feed_forward_norm.bias.fill_(1.0)
            weight = trainer.model.mixtures[0].router.weight
            weight.mul_(15)
            weight[1] += 0.06
        trainer.run()
        return [row["expert_load_max"] for row in metrics(trainer) if row["split"] == "train"]

    left, evened = loads("left", 0.0, 15), loads("evened", 0.01, 55)
    assert left[0] == evened[0] > 2
    assert np.mean(left[-10:]) > 2
    assert np.mean(evened[-10:]) < 1.2


def test_the_loads_are_in_the_metrics_of_every_step(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer("run", **RUN)
    trainer.run()
    for row in metrics(trainer):
        if row["split"] == "train":
            assert 0 <= row["expert_load_min"] <= 1 <= row["expert_load_max"] <= 4
            assert row["expert_load_max"] == max(row["expert_load_max_by_layer"])
            assert len(row["expert_load_min_by_layer"]) == 2
