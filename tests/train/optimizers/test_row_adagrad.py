"""Row-wise Adagrad against its formula, written as a loop in float64, and its place beside the other optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sheepop.model import ModelConfig, build_model
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.optimizers.adafactor import RowAdagrad
from sheepop.train.optimizers.build import optimizer_slots
from sheepop.train.optimizers.groups import set_learning_rate

ROWS, WIDTH = 9, 4


def rows_of(places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(places[None], values, (ROWS, WIDTH), check_invariants=True)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_move_by_the_formula(sparse: bool) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((ROWS, WIDTH))
    sums = np.zeros(ROWS)
    table = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float32))
    optimizer = RowAdagrad([table], lr=0.3)
    for rate in (0.3, 0.2, 0.05, 0.1):
        set_learning_rate([optimizer], rate)
        places = rng.integers(0, ROWS, 6)  # a row may be looked up several times in a step
        parts = rng.standard_normal((6, WIDTH))
        gradient = np.zeros((ROWS, WIDTH))
        for place, part in zip(places, parts, strict=True):
            gradient[place] += part
        for row in set(places.tolist()):
            sums[row] += sum(gradient[row] ** 2) / WIDTH
            weights[row] -= rate * gradient[row] / np.sqrt(sums[row])
        found = rows_of(torch.tensor(places), torch.tensor(parts).float())
        table.grad = found if sparse else found.to_dense()
        optimizer.step()
    np.testing.assert_allclose(table.detach().numpy(), weights, atol=1e-6)
    np.testing.assert_allclose(optimizer.state[table]["sum"].numpy(), sums, rtol=1e-5)


def test_rows_that_were_not_looked_up_keep_their_bits() -> None:
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    before = table.detach().clone()
    optimizer = RowAdagrad([table], lr=0.3)
    table.grad = rows_of(torch.tensor([2, 5]), torch.ones(2, WIDTH))
    optimizer.step()
    changed = (table.detach() != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("name", list(OPTIMIZER_NAMES))
def test_tables_have_it_under_every_optimizer_and_are_not_decayed(name: str) -> None:
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20, "ngrams": {"rows": 8}}
    model = build_model(ModelConfig(**sizes), 0)
    schedule = "constant" if name == "schedule_free_adamw" else "cosine"
    config = TrainingConfig(optimizer=name, learning_rate=0.01, weight_decay=0.5, schedule=schedule)
    *others, last = build_optimizers(model, config)
    assert isinstance(last, RowAdagrad)
    ((group,),) = [last.param_groups]
    assert [parameter is model.ngrams.table for parameter in group["params"]] == [True]
    assert group["weight_decay"] == 0.0
    assert group["lr"] == pytest.approx(2.5 * 0.01)
    held = [id(p) for optimizer in (*others, last) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    model.ngrams.table.grad = torch.ones_like(model.ngrams.table)
    last.step()
    slots = optimizer_slots(last, group, model.ngrams.table)
    assert slots == {slot: tuple(value.shape) for slot, value in last.state[model.ngrams.table].items()}


def test_a_network_of_which_only_a_table_is_trained() -> None:
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20, "ngrams": {"rows": 8}}
    model = build_model(ModelConfig(**sizes), 0).requires_grad_(False)
    model.ngrams.table.requires_grad_(True)
    for name in ("adamw", "muon"):
        assert [type(optimizer) for optimizer in build_optimizers(model, TrainingConfig(optimizer=name))] == [
            RowAdagrad
        ]
