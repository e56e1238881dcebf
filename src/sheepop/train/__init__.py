"""Training: one loop for every objective, its schedule, optimizers, validation and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.core.errors import TrainingError
    from sheepop.train.checkpointer import Checkpointer
    from sheepop.train.config import TrainingConfig
    from sheepop.train.counters import TrainingState
    from sheepop.train.evaluation_weights import EvaluationWeights, build_evaluation_weights
    from sheepop.train.loop import Trainer
    from sheepop.train.optimizers.build import build_optimizers
    from sheepop.train.optimizers.groups import check_layers
    from sheepop.train.schedule import Schedule
    from sheepop.train.validation import Scores, TokenScores, validate
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Checkpointer",
    "EvaluationWeights",
    "Schedule",
    "Scores",
    "TokenScores",
    "Trainer",
    "TrainingConfig",
    "TrainingError",
    "TrainingState",
    "build_evaluation_weights",
    "build_optimizers",
    "check_layers",
    "validate",
]
