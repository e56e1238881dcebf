"""Training: one loop for every objective, its schedule, optimizers, validation and metrics."""

from sheepop.core.errors import TrainingError
from sheepop.train.config import TrainingConfig
from sheepop.train.loop import Trainer
from sheepop.train.optimizer import build_optimizers, clip_gradients
from sheepop.train.schedule import Schedule
from sheepop.train.state import Checkpointer, TrainingState
from sheepop.train.validation import Scores, validate

__all__ = [
    "Checkpointer",
    "Schedule",
    "Scores",
    "Trainer",
    "TrainingConfig",
    "TrainingError",
    "TrainingState",
    "build_optimizers",
    "clip_gradients",
    "validate",
]
