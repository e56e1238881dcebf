"""The sinks of metrics besides ``metrics.jsonl``: TensorBoard, Weights & Biases and MLflow; none can stop a run.

The loop only puts rows into a queue in memory. The sink's own thread opens the sink, writes and closes it. If that
raises an error, the thread tries the row again and finally gives up the sink. If it hangs, rows that do not fit into
the queue are counted as lost, and the end of the run waits only for a bounded time. ``metrics.jsonl`` always has every
row.

Weights & Biases gets the rows online if the machine is logged in; otherwise they are recorded offline, and ``wandb
sync`` sends them later. ``WANDB_MODE`` overrides this. MLflow writes to ``MLFLOW_TRACKING_URI``, or to its default
place, so that ``mlflow ui`` finds the run.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted

CAPACITY = 1_000
CLOSE_SECONDS = 10.0
RETRY_SECONDS = (0.5, 2.0)  # pauses before further tries of a row; after the last try the sink is given up
DIRECTORY = "tensorboard"
IDENTITY_TAG = "sheepop.run"
_NAME = "sheepop"  # of the project or experiment, unless the environment names another
_FINISH_SECONDS = 60.0
_LONGEST_VALUE = 500  # characters of a parameter that every version of MLflow's server accepts


class Sink(Protocol):
    """A destination for the rows of metrics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes one row."""

    def close(self) -> None:
        """Ends the writing."""


class GuardedSink:
    """One sink in a thread of its own; `write` never waits and never raises. `title` names it in warnings."""

    def __init__(
        self,
        title: str,
        open_sink: Callable[[], Sink],
        warn: Callable[[str], None],
        *,
        capacity: int = CAPACITY,
        retry_seconds: Sequence[float] = RETRY_SECONDS,
    ) -> None:
        self.title = title
        self.lost = 0  # rows that are not in the sink
        self._open_sink, self._warn = open_sink, warn
        self._capacity, self._retry_seconds = capacity, retry_seconds
        self._rows: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._sink: Sink | None = None
        self._closing, self._given_up = False, False
        self._error: str | None = None
        self._said_error, self._said_full = False, False
        # A daemon: a thread that hangs does not keep the program from ending.
        self._thread = threading.Thread(target=self._work, name=f"sink {title}", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands one row to the thread, or counts it as lost if the sink is given up or its queue is full."""
        with self._changed:
            full = len(self._rows) >= self._capacity
            if self._given_up or full:
                self.lost += 1
            else:
                self._rows.append(dict(row))
                self._changed.notify()
        if full and not self._said_full:
            self._said_full = True
            self._warn(f"{self.title} cannot keep up; the rows that it cannot take will be missing there.")
        self._say_error()

    def ask_to_close(self) -> None:
        """Tells the thread to end after the queued rows."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for the thread to end, and warns about rows that the sink lacks."""
        self._thread.join(max(0.0, seconds))
        self._say_error()
        with self._changed:
            missing = self.lost + len(self._rows)
        if self._thread.is_alive():
            self._warn(f"{self.title} did not finish in time and was given up; the last rows may be missing there.")
        if missing:
            self._warn(f"{self.title} is missing {counted(missing, 'row')} of this run; metrics.jsonl has all of them.")

    def _say_error(self) -> None:
        """Warns about the first error, in the thread of the loop."""
        if self._error is not None and not self._said_error:
            self._said_error = True
            self._warn(f"{self.title} failed; the run continues without it: {self._error}")

    def _work(self) -> None:
        if self._succeeds(self._open):
            while (row := self._next_row()) is not None:
                if not self._write_with_retries(row):
                    break
        with self._changed:
            self._given_up = True
            self.lost += len(self._rows)
            self._rows.clear()
        if self._sink is not None:
            self._succeeds(self._sink.close)

    def _open(self) -> None:
        self._sink = self._open_sink()

    def _next_row(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closing)
            return self._rows.popleft() if self._rows else None

    def _write_with_retries(self, row: dict[str, Any]) -> bool:
        """Writes the row with further tries; returns whether one succeeded. The end of the run cuts pauses short."""
        assert self._sink is not None
        for pause in (*self._retry_seconds, None):
            if self._succeeds(partial(self._sink.write, row)):
                return True
            if pause is not None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=pause)
        with self._changed:
            self.lost += 1
        return False

    def _succeeds(self, action: Callable[[], None]) -> bool:
        """Runs the action; returns whether it raised no error. The first error is kept for a warning.

        Catches everything, even an exit, because a library must not end the run.
        """
        try:
            action()
        except BaseException as error:
            if self._error is None:
                self._error = f"{type(error).__name__}: {error}"
            return False
        return True


class Sinks:
    """All sinks of a run as one; the end of the block closes them in parallel, within one time limit."""

    def __init__(self, sinks: Sequence[GuardedSink], *, close_seconds: float = CLOSE_SECONDS) -> None:
        self._sinks, self._close_seconds = sinks, close_seconds

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands the row to every sink."""
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Waits for every thread to end, until the time limit."""
        deadline = time.monotonic() + self._close_seconds
        for sink in self._sinks:
            sink.ask_to_close()
        for sink in self._sinks:
            sink.wait(deadline - time.monotonic())

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Scalars of every row as TensorBoard events, under ``split/name`` by step.

    TensorBoard drops the events of steps that a resumed run repeats.
    """

    def __init__(self, run: RunDescription, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory / DIRECTORY), purge_step=run.first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds the row's numbers. After a rewind, TensorBoard drops the events after the restored checkpoint."""
        if "back_to" in row:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            start = Event(step=row["back_to"] + 1, session_log=SessionLog(status=SessionLog.START))
            self._writer.file_writer.add_event(start)  # type: ignore[attr-defined]
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs the numbers of every row under ``split/name`` by step, without questions; a resumed run continues them."""

    def __init__(self, run: RunDescription, say: Callable[[str], None]) -> None:
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
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _NAME),
            name=run.name,
            id=run.identity,
            resume="allow",
            mode=mode,
            dir=str(run.directory),
            config=dict(run.settings),
            settings=settings,
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the row's numbers at its step; the service ignores steps that it already has."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        """Sends the remaining rows and ends the run."""
        self._run.finish()


class MLflow:
    """Logs the numbers of every row under ``split/name`` by step; a resumed run continues its curves."""

    def __init__(self, run: RunDescription, say: Callable[[str], None]) -> None:
        # Its messages about database tables would be printed over the live view.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        client = self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _NAME)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        known = client.search_runs([experiment_id], f"tags.`{IDENTITY_TAG}` = '{run.identity}'", max_results=1)
        if known:
            self._run_id = known[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        made = client.create_run(experiment_id, run_name=run.name, tags={IDENTITY_TAG: run.identity})
        self._run_id = made.info.run_id
        for key, value in run.flat_settings().items():
            if len(value) <= _LONGEST_VALUE:
                client.log_param(self._run_id, key, value)
            else:
                client.set_tag(self._run_id, f"setting.{key}", value)

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
    "tensorboard": SinkKind("TensorBoard", "tensorboard", "pip install tensorboard", TensorBoard),
    "wandb": SinkKind("Weights & Biases", "wandb", _TRACKING, WeightsAndBiases),
    "mlflow": SinkKind("MLflow", "mlflow", _TRACKING, MLflow),
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
