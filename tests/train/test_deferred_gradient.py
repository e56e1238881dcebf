"""A gradient of the output weight that is computed block by block gives the steps of one that exists as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sheepop.model import IGNORE_INDEX, LossSums, LossTerms, Transformer, deferred_gradient, logits
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, Objective
from sheepop.train.placement import Network, OneDevice
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

from .test_placement import expected_gradients, make_model, prepared

# How many rows of gradients of logits a step keeps, and how often a product with a triangle counts; 0 chooses it.
WAYS = {
    "nothing kept, norm of the gradient": (0, 1000),
    "nothing kept, norm by positions": (0, 0),
    "some kept, norm of the gradient": (40, 1000),
    "some kept, norm by positions": (40, 0),
    "all kept, norm by positions": (1000, 0),
}


@pytest.fixture(autouse=True, params=WAYS.values(), ids=WAYS)
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    kept_rows, cost = request.param
    monkeypatch.setattr(logits, "_LARGE", 1)
    monkeypatch.setattr(logits, "kept_rows", lambda *_: kept_rows)
    monkeypatch.setattr(deferred_gradient, "_TOKENS", 5)  # of 23
    monkeypatch.setattr(deferred_gradient, "_POSITIONS", 7)  # of 30 or more
    monkeypatch.setattr(deferred_gradient, "_SIDE", 8)
    monkeypatch.setattr(deferred_gradient, "_STRIPS_COST", cost)


class Opposed(NextToken):
    """Pairs of the same label after nearly the same hidden state, with weights that nearly cancel out."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        hidden = network.hidden_states(batch.inputs)
        labels = batch.labels.repeat_interleave(2, 1)[:, : hidden.shape[1]]
        log_p = network.head.log_probabilities(hidden[:, :1] + 0.01 * hidden, labels)
        signs = torch.where(torch.arange(log_p.shape[1]) % 2 == 0, 1.0, -1.01)
        total = (log_p * signs).sum()
        return LossSums(total, total.detach())


def runner_of(
    model: Transformer,
    objective: Objective | None = None,
    *,
    max_norm: float | None = None,
    precision: str = "fp32",
    **training: Any,
) -> StepRunner:
    placement = OneDevice(model, precision=precision, device="cpu")
    optimizers = build_optimizers(model, TrainingConfig(learning_rate=0.01, **training))
    return StepRunner(placement, objective or NextToken(), optimizers, TrainedWeights(), max_norm)


def undeferred(monkeypatch: pytest.MonkeyPatch, model: Transformer, **settings: Any) -> StepRunner:
    with monkeypatch.context() as patch:
        patch.setattr(logits, "_LARGE", 2**40)
        return runner_of(model, **settings)


@pytest.mark.parametrize(
    ("tied", "precision", "error"), [(True, "fp32", 1e-5), (False, "fp32", 1e-5), (True, "bf16", 0.02)]
)
def test_the_blocks_are_the_gradient_in_float64_and_the_norm_is_that_of_all(
    tied: bool, precision: str, error: float
) -> None:
    model = make_model(tied=tied)
    loss, expected = expected_gradients(model)
    runner = runner_of(model, precision=precision)
    found = runner.gradients(prepared(6, 2))
    deferred, head = runner.placement.deferred, model.lm_head.weight
    assert deferred is not None and deferred.is_active and head.grad is None
    blocks = [(rows, block.clone()) for rows, block in deferred.blocks()]
    assert [rows.stop - rows.start for rows, _ in blocks] == [5, 5, 5, 5, 3]
    name = next(name for name, parameter in model.named_parameters() if parameter is head)
    difference = torch.cat([block for _, block in blocks]).double() - expected[name]
    assert difference.norm() < error * expected[name].norm()
    norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in expected.values()]))
    assert found.read() == pytest.approx((loss, loss, norm.item()), rel=error)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "weight_decay": 0.1, "max_norm": 0.3},
        {"optimizer": "adam", "weight_decay": 0.0},
        {"optimizer": "sgd", "momentum": 0.9, "max_norm": 0.3},
        {"optimizer": "muon"},  # whose embeddings AdamW moves
    ],
    ids=lambda settings: settings["optimizer"],
)
def test_steps_and_the_optimizers_state_are_those_of_the_whole_gradient(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    models = make_model(), make_model()
    plain, runner = undeferred(monkeypatch, models[0], **settings), runner_of(models[1], **settings)
    assert plain.placement.deferred is None
    for number in range(3):
        outcomes = [each.take(prepared(6, 2), number=number, rate=0.01) for each in (plain, runner)]
        assert outcomes[1].norm == pytest.approx(outcomes[0].norm, rel=1e-4)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)
    for one_optimizer, other_optimizer in zip(plain.optimizers, runner.optimizers, strict=True):
        states = one_optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        for number, slots in states[0].items():
            assert slots.keys() == states[1][number].keys()
            for slot, value in slots.items():
                torch.testing.assert_close(states[1][number][slot], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_is_that_of_the_blocks_in_float64_where_positions_cancel_out(tied: bool) -> None:
    model = make_model(tied=tied)
    runner = runner_of(model, Opposed())
    found = runner.gradients(prepared(6, 2))
    deferred = runner.placement.deferred
    assert deferred is not None
    whole = torch.cat([block.double() for _, block in deferred.blocks()])
    rest = [each.grad.double() for each in model.parameters() if each is not model.lm_head.weight]  # type: ignore[union-attr]
    expected = torch.linalg.vector_norm(torch.cat([each.flatten() for each in (whole, *rest)]))
    assert found.norm.item() == pytest.approx(expected.item(), rel=1e-6)
    apart = sum((each.weights.abs() * each.hidden.norm(dim=1)).sum() for each in deferred._learnt.positions)
    assert whole.norm() < 0.1 * apart


def test_gradients_that_something_else_computes_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = NextToken(LossTerms(z_loss=0.1, label_smoothing=0.2))  # of which log-probabilities alone say too little
    models = make_model(), make_model()
    plain = undeferred(monkeypatch, models[0], objective=terms, max_norm=0.3)
    runner = runner_of(models[1], terms, max_norm=0.3)
    outcomes = [each.take(prepared(6, 2), number=0, rate=0.01) for each in (plain, runner)]
    assert outcomes[1].objective == pytest.approx(outcomes[0].objective, rel=1e-6) and outcomes[0].norm > 0.3
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


def test_optimizers_that_need_whole_matrices_and_verified_steps_get_them() -> None:
    for optimizer, verified in (("adafactor", False), ("adamw", True)):
        runner = runner_of(make_model(), optimizer=optimizer)
        runner.gradients(prepared(6, 2), verified=verified)
        assert runner.placement.model.lm_head.weight.grad is not None
        assert not runner.gradients(prepared(6, 2), verified=True).differences


def test_a_step_that_is_not_taken_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_model(), make_model()
    plain, runner = undeferred(monkeypatch, models[0]), runner_of(models[1])
    bad = runner.take(prepared(6, 2), number=0, rate=0.01, loss_scale=float("inf"))
    assert not bad.is_taken
    for each in (plain, runner):
        assert each.take(prepared(6, 3), number=0, rate=0.01).is_taken
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


def test_positions_without_labels_are_not_kept() -> None:
    runner = runner_of(make_model())
    step = prepared(6, 2)
    runner.gradients(step)
    deferred = runner.placement.deferred
    assert deferred is not None
    kept = sum(len(learnt.labels) for learnt in deferred._learnt.positions)
    assert kept == sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in step.micro_batches)
