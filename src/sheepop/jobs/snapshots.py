"""Snapshots of a run: one prompt on its way through the network at several steps, as numbers of the page's picture.

They come from the traces that the run stored (`trace.prompt`), or else from its checkpoints, one of which is loaded at
a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import CheckpointError, DataError, UsageError
from sheepop.interpret.journey import journey_of, stored_journey
from sheepop.interpret.store import StoredTrace
from sheepop.interpret.trace import Trace
from sheepop.jobs.config import SheepOpConfig

_KEPT = 256  # pictures of checkpoints, about 100 kB each
_MOST_BYTES = 2**32  # weights of a checkpoint that the page loads


class Snapshots:
    """The pictures of runs at their steps; those of checkpoints are kept, since each costs loading a model."""

    def __init__(self, open_trace: Callable[[RunDirectory, int], StoredTrace]) -> None:
        self._open_trace = open_trace
        self._kept: OrderedDict[tuple[Path, int, tuple[int, ...] | None], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, run: RunDirectory) -> tuple[str, list[int]]:
        """Where the pictures come from, ``traces`` or ``checkpoints``, and their steps in ascending order."""
        traced = traced_steps(run)
        if traced and self._has_picture(self._open_trace(run, traced[-1])):
            return "traces", traced
        return "checkpoints", run.steps()

    def picture(
        self, run: RunDirectory, step: int, config: SheepOpConfig, prompt: str, channels: Sequence[int] | None
    ) -> dict[str, Any]:
        """The picture of a step, seen from the last token; `channels` are those to show instead of the most varied.

        Raises `DataError` for a step without a snapshot, and `UsageError` for a channel out of range or a checkpoint
        that is too large to be loaded for a picture.
        """
        try:
            if step in traced_steps(run) and self._has_picture(stored := self._open_trace(run, step)):
                return stored_journey(stored, channels).to_dict(stored)
            if step in run.steps():
                return self._of_checkpoint(run.checkpoint(step), config, prompt, channels)
        except IndexError:
            raise UsageError(f"The vectors of {run.path} have no such channels: {channels}.") from None
        except FileNotFoundError as error:
            raise CheckpointError(f"{error.filename} was removed meanwhile. Choose another step.") from None
        raise DataError(f"{run.path} has no picture of step {step}: neither a trace with pictures nor a checkpoint.")

    def _of_checkpoint(
        self, place: Path, config: SheepOpConfig, prompt: str, channels: Sequence[int] | None
    ) -> dict[str, Any]:
        size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        if size > _MOST_BYTES:
            raise UsageError(
                f"{place} has {size / 1e9:.1f} GB of weights, more than the page loads for a picture. Train with "
                "trace.prompt, which stores pictures while the run trains."
            )
        key = (place, place.stat().st_mtime_ns, None if channels is None else tuple(channels))
        with self._lock:
            if key not in self._kept:
                # On the processor, so that a run in training keeps the memory of its GPU.
                loaded = load_model(place, "cpu")
                trace = Trace.of(loaded.model, loaded.tokenizer, prompt, config.trace.target)
                self._kept[key] = journey_of(trace, -1, None, channels).to_dict(trace)
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]

    @staticmethod
    def _has_picture(stored: StoredTrace) -> bool:
        return stored.is_whole and stored.contributions is not None


def traced_steps(run: RunDirectory) -> list[int]:
    """The steps at which the prompt of `trace.prompt` was traced, in ascending order."""
    found = run.traces.iterdir() if run.traces.is_dir() else ()
    numbers = (place.name.removeprefix("step-") for place in found if place.name.startswith("step-"))
    return sorted(int(number) for number in numbers if number.isdecimal())
