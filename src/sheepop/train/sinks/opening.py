"""The table of sinks, by the name that ``training.sinks`` gives them, and the opening of those that a run wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.train.sinks.guard import GuardedSink, Sinks
from sheepop.train.sinks.interface import RunDescription, Sink
from sheepop.train.sinks.mlflow import MLflow
from sheepop.train.sinks.tensorboard import TensorBoard
from sheepop.train.sinks.wandb import WeightsAndBiases


@dataclass(frozen=True)
class SinkKind:
    """One row of the table: what people call it, the module it needs, and how it is opened."""

    title: str
    module: str
    remedy: str
    open: Callable[[RunDescription, Callable[[str], None]], Sink]


_TRACKING = 'pip install "sheepop[tracking]"'
KINDS = {
    "tensorboard": SinkKind("TensorBoard", "tensorboard", "pip install tensorboard", TensorBoard.open),
    "wandb": SinkKind("Weights & Biases", "wandb", _TRACKING, WeightsAndBiases.open),
    "mlflow": SinkKind("MLflow", "mlflow", _TRACKING, MLflow.open),
}


def require_sinks(names: Sequence[str]) -> None:
    """Raises `ConfigError` for a sink whose package is missing, before any work is done."""
    for name in names:
        kind = KINDS[name]
        if find_spec(kind.module) is None:
            raise ConfigError(
                f"training.sinks names {name}, but the package {kind.module} is not installed. "
                f"Install it ({kind.remedy}), or leave {name} out of training.sinks."
            )


def open_sinks(names: Sequence[str], run: RunDescription, console: Console) -> Sinks:
    """The sinks of `run`, each in its own thread, in which it is opened too."""
    kinds = [KINDS[name] for name in names]
    return Sinks([GuardedSink(kind.title, partial(kind.open, run, console.info), console.warn) for kind in kinds])
