"""The sinks TensorBoard, Weights & Biases and MLflow.

Weights & Biases gets the rows online if the machine is logged in; otherwise they are recorded offline, and ``wandb
sync`` sends them later. ``WANDB_MODE`` overrides this. MLflow writes to ``MLFLOW_TRACKING_URI``, or to its default
place, so that ``mlflow ui`` finds the run.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.train.sinks.guard import GuardedSink, Sink, Sinks

DIRECTORY = "tensorboard"
IDENTITY_TAG = "sheepop.run"
_NAME = "sheepop"  # of the project or experiment, unless the environment names another
_FINISH_SECONDS = 60.0
_LONGEST_VALUE = 500  # characters of a parameter that every version of MLflow's server accepts


@dataclass(frozen=True)
class RunDescription:
    """A description of the run for a sink.

    `identity` stays the same however often the run is resumed; `first_step` is the step at which this session starts;
    `settings` is the configuration.
    """

    directory: Path
    name: str
    identity: str
    first_step: int
    settings: Mapping[str, Any]

    def flat_settings(self) -> dict[str, str]:
        """The configuration as a flat table: keys such as ``training.max_steps``, and values as JSON."""
        return {
            path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for path, value in leaves(self.settings)
        }


class TensorBoard:
    """Scalars of every row as TensorBoard events, under ``split/name`` by step."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> TensorBoard:
        """Opens the events of `run`; TensorBoard drops those of steps that the run repeats."""
        return cls(run.directory / DIRECTORY, run.first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds the row's numbers. After a rewind, TensorBoard drops the events after the restored checkpoint."""
        if "back_to" in row:
            self._strike_out(row["back_to"] + 1)
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()

    def _strike_out(self, first_step: int) -> None:
        """Makes TensorBoard drop the values from `first_step` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(start)  # type: ignore[attr-defined]


class WeightsAndBiases:
    """Logs the numbers of every row under ``split/name`` by step; a resumed run continues its curves."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> WeightsAndBiases:
        """Starts or continues the run in the service, without questions on the terminal."""
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False):
            mode = "offline"
            say(f"Weights & Biases: not logged in here, so the run is recorded in {run.directory / 'wandb'}.")
        settings = wandb.Settings(
            console="off",  # SheepOp writes to the terminal
            silent=True,
            disable_git=True,
            finish_timeout=_FINISH_SECONDS,
        )
        return cls(
            wandb.init(
                project=os.environ.get("WANDB_PROJECT", _NAME),
                name=run.name,
                id=run.identity,
                resume="allow",
                mode=mode,
                dir=str(run.directory),
                config=dict(run.settings),
                settings=settings,
            )
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the row's numbers at its step; the service ignores steps that it already has."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        """Sends the remaining rows and ends the run."""
        self._run.finish()


class MLflow:
    """Logs the numbers of every row under ``split/name`` by step; a resumed run continues its curves."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> MLflow:
        """Starts a run in MLflow, or continues the one with this identity."""
        # Its messages about database tables would be printed over the live view.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _NAME)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        known = client.search_runs([experiment_id], f"tags.`{IDENTITY_TAG}` = '{run.identity}'", max_results=1)
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return cls(client, known[0].info.run_id)
        made = client.create_run(experiment_id, run_name=run.name, tags={IDENTITY_TAG: run.identity})
        sink = cls(client, made.info.run_id)
        sink._log_settings(run)
        return sink

    def _log_settings(self, run: RunDescription) -> None:
        """Logs the configuration as parameters; values that are too long become tags."""
        for name, value in run.flat_settings().items():
            if len(value) <= _LONGEST_VALUE:
                self._client.log_param(self._run_id, name, value)
            else:
                self._client.set_tag(self._run_id, f"setting.{name}", value)

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the row's numbers at its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, row["step"]) for name, value in _numbers(row).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self._run_id)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under ``split/name``, without the step."""
    return {
        f"{row['split']}/{key}": value
        for key, value in row.items()
        if key not in ("step", "split") and isinstance(value, int | float)
    }


@dataclass(frozen=True)
class SinkKind:
    """A kind of sink: its title, the module that it needs, the command that installs it, and how to open it."""

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
    """Raises `ConfigError` for a sink whose package is missing."""
    for name in names:
        kind = KINDS[name]
        if find_spec(kind.module) is None:
            raise ConfigError(
                f"training.sinks names {name}, but the package {kind.module} is not installed. "
                f"Install it ({kind.remedy}), or leave {name} out of training.sinks."
            )


def open_sinks(names: Sequence[str], run: RunDescription, console: Console) -> Sinks:
    """The sinks of `run`; each is opened and written in a thread of its own."""
    kinds = [KINDS[name] for name in names]
    return Sinks([GuardedSink(kind.title, partial(kind.open, run, console.info), console.warn) for kind in kinds])
