"""Ends a run in which a rank hangs: every rank writes its stack traces to a file, and all of them end."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sheepop.core.console import Console
from sheepop.parallel.ranks import Board

_LOOKS = 20  # per patience
_WRITING_SECONDS = 2.0


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
        while not self._ended.wait(min(1.0, self._seconds / _LOOKS)):
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
