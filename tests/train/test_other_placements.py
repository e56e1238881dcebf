"""Other placements than one device, frozen weights, and data that is made while training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.errors import ConfigError, Interrupted
from sheepop.model import LossSums, Outputs, Transformer
from sheepop.model.head import OutputHead
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import ALONE
from sheepop.train import Trainer, TrainingConfig, build_optimizers
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.placement import OneDevice, Pass, Placement
from sheepop.train.source import PreparedStep, StepSource
from sheepop.train.tensor_batch import TensorBatch

from .runs import assert_same_run, settings_of, timeless, weights

MakeTrainer = Callable[..., Trainer]


class TwoRanks(Placement):
    """Two models, each of which computes every second micro-batch; the optimizers move the first one's weights.

    What ranks of their own would send each other is copied here. `asked` says when they had to agree.
    """

    device = "cpu"
    layout = Layout(ALONE, ParallelConfig())

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.ranks = [OneDevice(each, precision="fp32", device="cpu") for each in (model, copy.deepcopy(model))]
        self.turn = 0
        self.asked: list[float] = []

    @property
    def modules(self) -> Transformer:
        return self.ranks[0].modules

    @property
    def head(self) -> OutputHead:
        return self.ranks[self.turn].head

    @property
    def may_be_left(self) -> bool:
        return False

    def begin_step(self) -> None:
        for one, other in zip(self.model.parameters(), self.ranks[1].model.parameters(), strict=True):
            other.data.copy_(one.data)
        for rank in self.ranks:
            rank.begin_step()

    def arithmetic(self) -> AbstractContextManager[None]:
        return self.ranks[self.turn].arithmetic()

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        return self.ranks[self.turn].run(inputs)

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.run(inputs).hidden_states

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        found = []
        for number, batch in enumerate(batches):
            found.append(pass_of(number, batch, self).back())
            self.turn = 1 - self.turn
        for one, other in zip(self.model.parameters(), self.ranks[1].model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            one.grad.add_(other.grad)
        return found

    def unscale(self, scale: float) -> None:
        self.ranks[0].unscale(scale)

    def clip(self, max_norm: float | None) -> Tensor:
        return self.ranks[0].clip(max_norm)

    def reduce(self, sums: Tensor) -> Tensor:
        return sums  # one process added them up

    def greatest(self, value: float) -> float:
        self.asked.append(value)
        return value

    def zero_gradients(self) -> None:
        for rank in self.ranks:
            rank.zero_gradients()

    def evaluating(self) -> AbstractContextManager[None]:
        return self.ranks[0].evaluating()


def test_two_ranks_train_as_one_device_does_on_all_their_rows(make_trainer: MakeTrainer) -> None:
    settings: dict[str, Any] = {"dropout": 0.0, "network": {"tie_weights": False}, "ema_decay": 0.8}
    whole, cut = make_trainer("whole", **settings), make_trainer("cut", micro_batch_size=4, **settings)
    ranks = make_trainer("ranks", micro_batch_size=4, **settings)
    ranks.runner.placement = TwoRanks(ranks.model)
    for trainer in (whole, cut, ranks):
        trainer.run()
    # Each parameter has one gradient from each rank, so even the order of the sums is that of one device.
    assert_same_run(cut, ranks)
    for one, other in zip(timeless(whole.journal.metrics.path), timeless(ranks.journal.metrics.path), strict=True):
        assert one.pop("split") == other.pop("split")
        assert other == pytest.approx(one, rel=1e-3)


def test_ranks_end_together_between_two_steps(make_trainer: MakeTrainer) -> None:
    """A signal that reaches one of them is asked about at the next boundary, and leaves nothing in its middle."""
    trainer = make_trainer("run", micro_batch_size=4, network={"tie_weights": False})
    placement = trainer.runner.placement = TwoRanks(trainer.model)
    clip = placement.clip

    def signalled(max_norm: float | None) -> Tensor:
        if trainer.state.step == 4:
            trainer._interruption.arrived(15)
        return clip(max_norm)

    placement.clip = signalled  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="after step 5 of 12"):
        trainer.run()
    # At every boundary whether the run is over, then which signal came.
    assert placement.asked == [0] * 11 + [15]
    assert trainer.checkpointer.run.pointer("latest") == 5


def freeze(*patterns: str) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(pattern in name for pattern in patterns))

    return change


@pytest.mark.parametrize("optimizer", list(OPTIMIZER_NAMES))
@pytest.mark.parametrize("frozen", [("blocks.",), ("embedding", "norm", "bias", "lm_head"), ("blocks.0.",)])
def test_any_part_of_a_network_may_be_frozen_under_any_optimizer(
    make_trainer: MakeTrainer, optimizer: str, frozen: tuple[str, ...]
) -> None:
    settings = {**settings_of(optimizer), "max_steps": 2, "eval_interval": 2, "sample_interval": 2}
    trainer = make_trainer("run", change=freeze(*frozen), dropout=0.0, **settings)
    before = weights(trainer)
    trainer.run()
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name]) == any(pattern in name for pattern in frozen), name


def test_a_network_of_which_nothing_trains_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_trainer("run").model
    freeze("")(model)
    with pytest.raises(ConfigError, match="Every parameter of the model is frozen"):
        build_optimizers(model, TrainingConfig())


@pytest.mark.parametrize("frozen", [("blocks.",), ("embedding",)])
def test_frozen_weights_are_bfloat16_everywhere_but_where_the_model_is_judged(
    make_trainer: MakeTrainer, frozen: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "ema_decay": 0.8, "network": {"tie_weights": False}}
    trainer = make_trainer("run", change=freeze(*frozen), dropout=0.0, **settings)
    places = {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    found = dict(trainer.runner.placement.modules.named_parameters())
    seen: list[set[torch.dtype]] = []

    def look(step: int) -> list[dict[str, Any]]:
        seen.append({parameter.dtype for parameter in trainer.model.parameters()})
        trainer.model(torch.zeros(1, 3, dtype=torch.long))
        return []

    trainer.sample = look
    trainer.run()
    for name, parameter in trainer.model.named_parameters():
        if any(pattern in name for pattern in frozen):
            assert parameter.dtype == torch.bfloat16
            assert found[name] is parameter  # one tensor, and no copy to cast anew
            assert parameter.data_ptr() == places[name]
        else:
            assert parameter.dtype == torch.float32
    assert seen == [{torch.float32}] * 4
    assert {tensor.dtype for tensor in read_all_weights(trainer.checkpointer.run.checkpoint(12)).values()} == {
        torch.float32
    }
    resumed = make_trainer("run", resume=True, change=freeze(*frozen), dropout=0.0, **settings)
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, resumed.model.get_parameter(name)), name


@dataclass
class OwnWords(StepSource):
    """Trains on what the network itself found likeliest, as rollouts do; nothing may be made before its step."""

    usual: StepSource
    model: Transformer
    certain: list[float] = field(default_factory=list)
    ahead: int = 0

    def prepare(self, number: int) -> PreparedStep:
        step = self.usual.prepare(number)
        for micro_batch in step.micro_batches:
            with torch.no_grad():
                log_p, words = torch.log_softmax(self.model(**micro_batch.inputs).double(), -1).max(-1)
            micro_batch.labels.copy_(words)
            self.certain.append(-log_p.mean().item())
        places = [replace(micro_batch, supervised=slice(None)) for micro_batch in step.micro_batches]
        return PreparedStep(places, sum(part.labels.numel() for part in places), num_reported=3, num_computed=7)

    def describe(self, number: int) -> list[str]:
        return []


def test_data_may_be_made_by_the_weights_as_each_step_finds_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("run", dropout=0.0)
    trainer.source = OwnWords(trainer.source, trainer.model)
    state = trainer.run()
    losses = [row["loss"] for row in timeless(trainer.journal.metrics.path) if row["split"] == "train"]
    assert losses == pytest.approx(trainer.source.certain, rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert state.tokens == 12 * 3  # what is reported is neither what normalises nor what measures speed
