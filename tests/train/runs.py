"""What is asked of whole runs: which rows they wrote, which weights they reached, and whether two are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sheepop.core.json_lines import read_json_lines
from sheepop.train import Trainer
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import Objective, StepLoss
from sheepop.train.placement import Placement
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner

TIMING = ("seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores")
TIMING += ("seconds_of_rows", "seconds_of_four_times")  # of the analysis

WARM_UPS: dict[str, Any] = {
    "batch_size_warmup": ((2, 3), (4, 5)),
    "sequence_length_warmup": ((1, 8), (5, 16)),
    "log_batch_hash": True,
}


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in TIMING} for row in read_json_lines(path)[0]]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_run(first: Trainer, second: Trainer) -> None:
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, second.model.get_parameter(name)), name
    one, two = first.checkpointer.run, second.checkpointer.run
    assert timeless(one.metrics_file) == timeless(two.metrics_file)
    assert one.samples_file.read_bytes() == two.samples_file.read_bytes()
    assert one.pointer("best") == two.pointer("best")


def settings_of(optimizer: str, ema_decay: float | None = None) -> dict[str, Any]:
    schedule = "constant" if optimizer == "schedule_free_adamw" else "cosine"
    return {"optimizer": optimizer, "schedule": schedule, "ema_decay": ema_decay}


def gradients_of(placement: Placement, objective: Objective, prepared: PreparedStep, **settings: Any) -> StepLoss:
    """The losses of a step whose gradients are left in the weights as they came, not clipped."""
    return StepRunner(placement, objective, [], TrainedWeights(), None).gradients(prepared, **settings).losses


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved because of it."""
