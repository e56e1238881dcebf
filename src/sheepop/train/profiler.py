"""Observes training steps: a profile of a few of them, and with several ranks the watches for late and missing ones.

Observing changes no result of a run: the profiler only records when operations begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sheepop.core.console import Console
from sheepop.core.facts import counted
from sheepop.core.files import storage_errors, write_atomic
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.stragglers import Lateness, Watchdog
from sheepop.train.step import Gradients

TRACE = "trace.json"
TABLE = "operations.txt"
WARMUP_STEPS = 3  # compilation, first allocations
_TABLE_ROWS = 40


# Returns the context of a step from the number of steps taken before it.
AroundStep = Callable[[int], AbstractContextManager[Any]]


def unobserved(step: int) -> AbstractContextManager[Any]:
    """The context of a step without a profiler."""
    return nullcontext()


class StepProfiler:
    """Records `num_steps` steps after the warm-up of this session and writes them into `directory`.

    If the session has only `steps_to_go` steps, too few for the whole warm-up, recording begins earlier. Errors become
    warnings, because a run is worth more than its trace.
    """

    def __init__(self, directory: Path, num_steps: int, *, steps_to_go: int, device: str, console: Console) -> None:
        self._directory, self._device, self._console = directory, device, console
        self._first = max(0, min(WARMUP_STEPS, steps_to_go - num_steps))
        self._last = min(self._first + num_steps, steps_to_go) - 1
        self._seen = 0
        self._profile: Any = None

    def __call__(self, step: int) -> AbstractContextManager[Any]:
        """The context for the next step; `step` names it in the trace."""
        number, self._seen = self._seen, self._seen + 1
        if number == self._first and number <= self._last:
            self._begin()
        elif number == self._last + 1:
            self.close()
        return record_function(f"step {step + 1}") if self._profile is not None else nullcontext()

    def close(self) -> None:
        """Writes the recorded steps, if they are not written yet."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        try:
            recorded.stop()
            self._write(recorded)
        except Exception as error:
            self._console.warn(f"The profile was not written: {type(error).__name__}: {error}")
        else:
            self._console.info(
                f"Profile: {self._directory / TABLE}, and {TRACE} in the same directory for https://ui.perfetto.dev."
            )

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            torch.cuda.synchronize()  # so that earlier work is not recorded
            activities.append(ProfilerActivity.CUDA)
        begun = profile(activities=activities, record_shapes=True)
        try:
            begun.start()
        except RuntimeError as error:
            self._console.warn(f"The profiler does not work here: {error}")
        else:
            self._profile = begun

    def _write(self, recorded: Any) -> None:
        with storage_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
            temporary = self._directory / f".{TRACE}.partial-profile"
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(self._directory / TRACE)
        key = "self_cuda_time_total" if self._device == "cuda" else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=key, row_limit=_TABLE_ROWS, max_name_column_width=48)
        by_shape = recorded.key_averages(group_by_input_shape=True)
        shapes = by_shape.table(
            sort_by=key, row_limit=_TABLE_ROWS, max_name_column_width=48, max_shapes_column_width=72
        )
        steps = counted(self._last - self._first + 1, "step")
        write_atomic(
            self._directory / TABLE,
            f"The costliest operations of {steps}, by their own time\n\n{table}\n\nThe same, by the shapes of their "
            f"inputs\n\n{shapes}\n",
        )


@contextmanager
def watched(
    around_step: AroundStep, ranks: Ranks, group: int, stacks: Path, patience: float, console: Console
) -> Iterator[tuple[AroundStep, Callable[[], dict[str, Any]]]]:
    """Yields `around_step` with the watches of several ranks around it, and what they measure for a row of metrics.

    `group` neighbouring ranks do the same work. A rank whose step takes more than `patience` seconds ends, and writes
    its stack traces into the folder `stacks`.
    """
    # A host that waits for its GPU waits for other ranks with it.
    lateness = Lateness(ranks, group, console, waits=[Gradients.read.__code__])
    watchdog = Watchdog(ranks.rank, ranks.board("watchdog"), stacks, patience, Console(quiet=True))

    @contextmanager
    def around(number: int) -> Iterator[None]:
        with watchdog.step(number), lateness.own_time.step(number), around_step(number):
            yield

    with lateness.own_time.watching(), watchdog.watching():
        yield around, lateness.measured
