"""Observes training steps: a profile of a few of them, and with several ranks the search for late and missing ones.

Observing changes no result of a run: the profiler only records when operations begin and end.

An exchange ends on all ranks when the last one has come to it, so all ranks have steps as long as the slowest one's.
They differ in how much of a step is their own work. A thread samples what the thread of the steps is doing, which costs
a step next to nothing and sees every exchange. It does not see what a GPU computes: with GPUs it compares the hosts,
which load data and start kernels.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sheepop.core.console import Console
from sheepop.core.facts import counted
from sheepop.core.files import storage_errors, write_atomic
from sheepop.parallel.ranks import Board, Ranks
from sheepop.train.step import Gradients

TRACE = "trace.json"
TABLE = "operations.txt"
WARMUP_STEPS = 3  # compilation, first allocations
_TABLE_ROWS = 40
_LOOK_SECONDS = 0.02
_FEWEST_LOOKS = 50  # samples that a measurement needs
_CLEARLY = 0.2  # of a step
_A_WHILE = 3  # measurements in a row
_EXCHANGES = ("torch.distributed", "sheepop.parallel.ranks")
_DEPTH = 2  # frames; a functional collective exchanges one call further in
_CHECKS = 20  # of the watchdog per patience
_WRITING_SECONDS = 2.0


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


class OwnTime:
    """Samples how much of the steps the thread that creates this spends on its own work rather than waiting.

    Waiting is every exchange and every function whose code is in `waits`.
    """

    def __init__(self, waits: Collection[CodeType] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._waits, self._clock = frozenset(waits), clock
        self._watched, self._ended = threading.get_ident(), threading.Event()
        self._since: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forgets all samples, and the time that a step has taken so far."""
        self._seconds, self._steps, self._looks, self._own = 0.0, 0, 0, 0
        if self._since is not None:
            self._since = self._clock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Samples within the block."""
        threading.Thread(target=self._watch, name="own time", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks the block as a step."""
        self._since = self._clock()
        self._steps += 1
        try:
            yield
        finally:
            self._seconds += self._clock() - self._since
            self._since = None

    def seen(self) -> tuple[float, float, float]:
        """Returns the seconds of a step, the share of own work in them, and the number of samples."""
        running = 0.0 if self._since is None else self._clock() - self._since
        return (self._seconds + running) / max(1, self._steps), self._own / max(1, self._looks), self._looks

    def look(self, frame: FrameType | None) -> None:
        """Adds a sample of a thread whose innermost call is `frame`."""
        self._looks += 1
        for _ in range(_DEPTH):
            if frame is None:
                break
            if frame.f_code in self._waits or str(frame.f_globals.get("__name__")).startswith(_EXCHANGES):
                return
            frame = frame.f_back
        self._own += 1

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if self._since is not None:
                self.look(sys._current_frames().get(self._watched))


def latest(own: Sequence[float], group: int) -> tuple[int, float]:
    """Returns the rank that is waited for and how long, from each rank's seconds of own work in a step.

    A rank is compared with the median of the others that do the same: `group` neighbouring ranks.
    """
    waited = [0.0] * len(own)
    for rank in range(len(own)):
        first = rank // group * group
        others = [own[other] for other in range(first, first + group) if other != rank]
        waited[rank] = max(0.0, own[rank] - median(others)) if others else 0.0
    rank = waited.index(max(waited))
    return rank, waited[rank]


@dataclass
class Suspicion:
    """Confirms a rank that was waited for clearly, several times in a row; later only another one, or twice as long.

    `told` are the rank that was confirmed last and its seconds.
    """

    rank: int = -1
    count: int = 0
    told: tuple[int, float] = (-1, 0.0)

    def confirmed(self, rank: int, waited: float, step: float) -> bool:
        """Whether to report `rank`, for which the others waited `waited` seconds of a step that took `step` seconds."""
        is_clear = waited > _CLEARLY * step
        self.count = (self.count + 1 if rank == self.rank else 1) if is_clear else 0
        self.rank = rank
        is_news = rank != self.told[0] or waited >= 2 * self.told[1]
        if self.count < _A_WHILE or not is_news:
            return False
        self.told = rank, waited
        return True


class Lateness:
    """Compares `ranks`, of which `group` neighbours do the same, and warns on the console of one that is late."""

    def __init__(self, ranks: Ranks, group: int, console: Console, waits: Collection[CodeType] = ()) -> None:
        self._ranks, self._group, self._console = ranks, group, console
        self.own_time, self._suspicion = OwnTime(waits), Suspicion()
        self._hosts = ranks.gathered(socket.gethostname())

    def measured(self) -> dict[str, Any]:
        """Returns the slowest rank for a row of metrics, if there are enough samples; all ranks call it together."""
        seen = torch.zeros(self._ranks.size, 3, dtype=torch.float64)
        seen[self._ranks.rank] = torch.tensor(self.own_time.seen(), dtype=torch.float64)
        steps, shares, looks = self._ranks.total(seen).T.tolist()
        if min(looks) < _FEWEST_LOOKS:
            return {}
        self.own_time.restart()
        rank, waited = latest([step * share for step, share in zip(steps, shares, strict=True)], self._group)
        if self._suspicion.confirmed(rank, waited, steps[rank]):
            self._console.warn(
                f"Rank {rank}, on {self._hosts[rank]}, arrives {waited:.2g} s after the others at every step "
                f"({steps[rank]:.2g} s), so all wait for it."
            )
        return {"slowest_rank": rank, "seconds_waited_for": waited}


class Watchdog:
    """Ends this rank when one of its steps, or a step of any other rank, takes longer than `seconds`.

    Each rank first writes the stacks of all its threads into a file in `folder`, and one of them warns on the console.
    The process ends with code 1, so that a launcher can restart it; a rank that waits for a message cannot end
    otherwise.
    """

    def __init__(self, rank: int, board: Board, folder: Path, seconds: float, console: Console) -> None:
        self._rank, self._board, self._folder = rank, board, folder
        self._seconds, self._console = seconds, console
        self._step: tuple[int, float] | None = None
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches within the block."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks the block as a step, whose time is limited."""
        self._step = number, time.monotonic()
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / _CHECKS)):
            if self._is_late() or self._another_is_late():
                self._end()

    def _is_late(self) -> bool:
        step = self._step
        return step is not None and time.monotonic() - step[1] > self._seconds

    def _another_is_late(self) -> bool:
        try:
            return self._board.count() > 0
        except RuntimeError:  # the store ended with the first rank; this rank's own step is still limited
            return False

    def _end(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"rank-{self._rank:05}.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        try:
            speaks = self._board.arrive() == 1
        except RuntimeError:
            speaks = False
        if speaks:
            step = self._step
            at = "A step" if step is None else f"Step {step[0] + 1:,}"
            self._console.warn(
                f"{at} has taken more than {self._seconds:,.0f} seconds (parallel.patience), so this run ends. The "
                f"stack traces of every rank are in {self._folder}."
            )
            time.sleep(_WRITING_SECONDS)  # a launcher ends the others when this one has ended
        os._exit(1)
