"""Every strategy with everything that a run may ask for, against the same steps on one device.

A row of the matrix is a strategy, a column a feature: precision, memory, optimizer, averages, changed networks, steps
of changing shape. All of it is a campaign; the cheapest cells that tell most are there every day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.random import seed_torch
from sheepop.model import IGNORE_INDEX, LossTerms, ModelConfig, Transformer, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.train import TrainingConfig, build_evaluation_weights, build_optimizers
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

from .conftest import Together
from .strategies import STRATEGIES, Strategy

_NETWORK = ModelConfig(
    vocab_size=67, d_model=32, num_layers=4, num_heads=4, max_seq_len=16, dropout=0.0, position_encoding="rope",
    norm="rmsnorm", activation="swiglu", bias=False, qk_norm="head", short_convolution=3, ngrams={"rows": 64},
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Rows, their length, and the rows of a micro-batch, of one step after the other."""

    shapes: tuple[tuple[int, int, int], ...] = ((8, 16, 2),) * 4

    def prepared(self, strategy: Strategy) -> Iterator[PreparedStep]:
        """The steps, of which every other one has rows of two documents, unless the strategy needs whole ones."""
        are_packed = not strategy.data
        generator = torch.Generator().manual_seed(3)
        for number, (rows, length, each) in enumerate(self.shapes):
            ids = torch.randint(0, 67, (rows, length + 1), generator=generator)
            labels, documents = ids[:, 1:].clone(), torch.zeros(rows, length, dtype=torch.long)
            if number % 2 == 0:
                documents[:, 5:] = 1
                labels[: rows // 3, 4:7] = IGNORE_INDEX
            batches = []
            for some in (slice(start, start + each) for start in range(0, rows, each)):
                inputs = {"input_ids": ids[some, :-1].contiguous()}
                if number % 2 == 0 and are_packed:
                    inputs["document_ids"] = documents[some]
                counted = (labels[some].flatten() != IGNORE_INDEX).nonzero()[:, 0]
                batches.append(TensorBatch(inputs, labels[some], counted))
            count = int((labels != IGNORE_INDEX).sum())
            yield PreparedStep(batches, num_tokens=count, num_reported=count, num_computed=count)


def _adapted(model: Transformer) -> None:
    add_lora(model, LoraConfig(rank=2), seed=1)
    for number, factor in enumerate(each for each in model.parameters() if each.requires_grad):
        factor.data.normal_(std=0.02, generator=torch.Generator().manual_seed(number))  # the second ones begin with 0


def _half_frozen(model: Transformer) -> None:
    for number, block in enumerate(model.layers):
        block.attention.requires_grad_(number % 2 == 0)
    model.final_norm.requires_grad_(False)


def _unchanged(model: Transformer) -> None:
    pass


@dataclass(frozen=True)
class Feature:
    """What is asked for beside the strategy, and how far two ways of rounding may lie apart.

    `gradient` is the greatest relative difference of a parameter's gradient, `moved` that of what its weights have
    moved by; `loss` is absolute, in nats.
    """

    network: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    scale: float = 1.0
    checkpointing: Any = "none"
    compiled: bool = False
    terms: LossTerms = field(default_factory=LossTerms)
    change: Callable[[Transformer], None] = _unchanged
    steps: Steps = field(default_factory=Steps)
    gradient: float = 1e-5
    moved: float = 1e-2
    loss: float = 1e-5


# What rounding to two bytes leaves alike: of gradients a few percent, and of what Adam makes of the smallest ones less.
_TWO_BYTES = {"gradient": 0.06, "moved": 0.5, "loss": 1e-3}

FEATURES = {
    "bf16": Feature(precision="bf16", **_TWO_BYTES),
    "bf16, full checkpointing, Muon, average": Feature(
        training={"optimizer": "muon", "ema_decay": 0.7}, precision="bf16", checkpointing="full", **_TWO_BYTES
    ),
    "fp16": Feature(precision="fp16", scale=2.0**10, **_TWO_BYTES),
    "selective checkpointing, schedule-free": Feature(
        training={"optimizer": "schedule_free_adamw", "warmup_steps": 2}, checkpointing="selective"
    ),
    "full checkpointing, Lion, other terms": Feature(
        training={"optimizer": "lion"}, checkpointing="full", terms=LossTerms(z_loss=0.01, label_smoothing=0.1)
    ),
    "frozen parameters, average": Feature(change=_half_frozen, training={"ema_decay": 0.7}),
    "warm-ups, untied": Feature(
        steps=Steps(((4, 8, 1), (16, 8, 2), (8, 16, 1), (8, 16, 1))),
        network={"tie_weights": False, "qk_norm": "own_head"},
    ),
}
"""For every strategy."""

OF_DATA_RANKS = {
    "LoRA": Feature(change=_adapted),
    "bf16, LoRA": Feature(change=_adapted, precision="bf16", **_TWO_BYTES),
    "dropout": Feature(network={"dropout": 0.1}),
    "dropout, full checkpointing": Feature(network={"dropout": 0.1}, checkpointing="full"),
    "experts, dropout, Muon": Feature(
        network={"experts": {"count": 4, "per_token": 2}, "dropout": 0.1}, training={"optimizer": "muon"}
    ),
}
"""For strategies whose ranks have rows of their own."""

COMPILED = {
    "compile": Feature(compiled=True),
    "compile, bf16, full checkpointing": Feature(compiled=True, precision="bf16", checkpointing="full", **_TWO_BYTES),
}
"""For strategies that can be compiled."""

_ALL = FEATURES | OF_DATA_RANKS | COMPILED
Cell = tuple[str, str]
"""The names of a strategy and of a feature."""


@dataclass
class Course:
    """What became of the steps: losses, norms, the first gradients, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    differences: list[str]
    gradients: dict[str, Tensor]
    begun: dict[str, Tensor]
    trained: dict[str, Tensor]
    evaluated: dict[str, Tensor]


def _course(feature: Feature, strategy: Strategy, ranks: Ranks | None) -> Course:
    """The steps, by one device or by these ranks, of which the others begin with weights that they have to give up."""
    model = build_model(_NETWORK.replace(**{**strategy.network, **feature.network}), seed=ranks.rank if ranks else 0)
    feature.change(model)
    apply_activation_checkpointing(model, feature.checkpointing)
    config = TrainingConfig(learning_rate=1e-3, schedule="constant", **feature.training)
    optimizers = build_optimizers(model, config)
    options: dict[str, Any] = {"precision": feature.precision, "device": "cpu", "compiled": feature.compiled}
    placement: Placement
    if ranks is None:
        placement = OneDevice(model, **options)
    else:
        layout = Layout(ranks, ParallelConfig(**strategy.layout))
        kind = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
        placement = kind(model, layout, optimizers, **options)
    evaluation = build_evaluation_weights(model, optimizers, config)
    runner = StepRunner(placement, with_experts(NextToken(feature.terms), model.config), optimizers, evaluation, 0.5)
    begun = _wholes(placement, model)
    losses: list[float] = []
    norms: list[float] = []
    for number, step in enumerate(feature.steps.prepared(strategy)):
        if isinstance(placement, ShardedModel):
            step = step.part(placement.layout.share(len(step.micro_batches)))
            step = step if placement.context is None else step.columns(placement.context)
        seeds = partial(seed_torch, 5, "dropout", number)
        how: dict[str, Any] = {"loss_scale": feature.scale, "before_forward": seeds}
        if number == 0:
            differences = list(runner.gradients(step, verified=True, **how).differences)
            here = {name: each.grad.to_dense() for name, each in model.named_parameters() if each.grad is not None}
            gradients = dict(placement.pieces.wholes(here) if isinstance(placement, ShardedModel) else here)
        outcome = runner.take(step, number=number, **how)
        assert outcome.is_taken
        losses.append(outcome.objective)
        norms.append(outcome.norm)
    trained = _wholes(placement, model)
    with evaluation.applied():
        evaluated = _wholes(placement, model)
    return Course(losses, norms, differences, gradients, begun, trained, evaluated)


def _wholes(placement: Placement, model: Transformer) -> dict[str, Tensor]:
    with placement.evaluating():
        return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], begun: dict[str, Tensor] | None = None) -> float:
    """The greatest difference of a tensor, relative to what it is, or to how far it has come."""
    found = 0.0
    for name, one in theirs.items():
        size = (one if begun is None else one - begun[name]).norm()
        found = max(found, float((ours[name] - one).norm() / size.clamp(min=1e-7)))
    return found


# In two bytes a token whose experts are nearly equal goes to the other one: one of about 60 that an expert has.
_REROUTED = 0.25


def _complaints(feature: Feature, strategy: Strategy, ours: Course, theirs: Course) -> list[str]:
    """What of the course over ranks is not that of one device."""
    may_reroute = feature.precision != "fp32" and "experts" in strategy.network
    gradient = _REROUTED if may_reroute else feature.gradient
    found = {
        "loss": (max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)), feature.loss),
        "norm": (max(abs(a / b - 1) for a, b in zip(ours.norms, theirs.norms, strict=True)), gradient),
        "names": (len(ours.gradients.keys() ^ theirs.gradients.keys()), 0),
        "gradient": (_distance(ours.gradients, theirs.gradients), gradient),
        "trained": (_distance(ours.trained, theirs.trained, theirs.begun), feature.moved),
        "evaluated": (_distance(ours.evaluated, theirs.evaluated, theirs.begun), feature.moved),
    }
    return ours.differences + [f"{name} {value:.3g}" for name, (value, limit) in found.items() if not value <= limit]


def _compare(cells: list[Cell], file: Path) -> None:
    """Takes the steps of every cell; the first rank compares them with its own alone, and writes what differs."""
    torch.set_num_threads(1)
    alone, lines = dict[tuple[str, str], Course](), []
    with Ranks.joined() as joined:
        joined.connect("cpu")
        for name, requested in cells:
            strategy, feature = STRATEGIES[name], _ALL[requested]
            ours = _course(feature, strategy, joined)
            if joined.is_first:
                key = requested, str(strategy.needs)
                theirs = alone[key] if key in alone else _course(feature, strategy, None)
                alone[key] = theirs
                lines += [f"{name}, {requested}: {line}" for line in _complaints(feature, strategy, ours, theirs)]
        if joined.is_first:
            file.write_text("\n".join([*lines, "done"]))


def _require_same(together: Together, cells: Iterable[Cell], file: Path) -> None:
    chosen = list(cells)
    (ranks,) = {STRATEGIES[name].ranks for name, _ in chosen}
    together.call(ranks, _compare, chosen, file)
    assert file.read_text() == "done"


def test_what_is_asked_for_most_together_changes_nothing(together: Together, tmp_path: Path) -> None:
    everything = "bf16, full checkpointing, Muon, average"
    cells = [(name, everything) for name in ("zero 3", "tensor", "context", "1f1b")]
    others = [("zero 2", "dropout, full checkpointing"), ("expert", "selective checkpointing, schedule-free")]
    _require_same(together, [*cells, *others], tmp_path / "found")


@pytest.mark.campaign
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_goes_with_every_feature(together: Together, tmp_path: Path, name: str) -> None:
    strategy = STRATEGIES[name]
    requested = FEATURES | (OF_DATA_RANKS if strategy.shares_rows_only else {})
    goes = {key for key, each in requested.items() if each.checkpointing == "none" or not strategy.puts_off_weights}
    _require_same(together, [(name, key) for key in requested if key in goes], tmp_path / "found")


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name, each in STRATEGIES.items() if each.compiles])
def test_every_strategy_that_can_be_compiled_learns_the_same(together: Together, tmp_path: Path, name: str) -> None:
    _require_same(together, [(name, feature) for feature in COMPILED], tmp_path / "found")
