"""TensorBoard: event files beside the run's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sheepop.train.sinks.interface import RunDescription, numbers

DIRECTORY = "tensorboard"


class TensorBoard:
    """Scalars of every row as TensorBoard events, under ``split/name`` by step."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> TensorBoard:
        """The events of `run`; those of steps that are taken again are struck out."""
        return cls(run.directory / DIRECTORY, run.first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds the row's numbers. What came after a checkpoint that the run went back to is struck out."""
        if "back_to" in row:
            self._strike_out(row["back_to"] + 1)
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()

    def _strike_out(self, first_step: int) -> None:
        """Marks that values from `first_step` on come again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._writer.file_writer.add_event(start)  # type: ignore[attr-defined]
