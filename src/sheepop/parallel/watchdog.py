"""What becomes of a run when a rank hangs: every rank writes down where it stands, and all end."""

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

_LOOKS = 20  # in the time of a step that takes too long
_WRITING_SECONDS = 2.0


class Watchdog:
    """Watches the steps of this rank, and hears when another one's takes longer than `seconds`.

    Then each rank writes the stack of all of its threads into a file in `folder`, one says so, and the process ends
    with code 1, so that a launcher can begin anew. A rank that waits for a message cannot end otherwise.
    """

    def __init__(self, rank: int, board: Board, folder: Path, seconds: float, console: Console) -> None:
        self._rank, self._board, self._folder = rank, board, folder
        self._seconds, self._console = seconds, console
        self._step: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches within the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The work of a step, which may take the time that was given."""
        self._step = number, time.monotonic()
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / _LOOKS)):
            if self._is_late() or self._hears_of_another():
                self._end()

    def _is_late(self) -> bool:
        step = self._step
        return step is not None and time.monotonic() - step[1] > self._seconds

    def _hears_of_another(self) -> bool:
        try:
            return self._board.count() > 0
        except RuntimeError:  # what keeps the words has gone with the first rank; the time of this step goes on
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
                f"{at} has taken more than {self._seconds:,.0f} seconds (parallel.patience), so this run ends. Where "
                f"every rank stands is written in {self._folder}."
            )
            time.sleep(_WRITING_SECONDS)  # a launcher ends the others when this one has ended
        os._exit(1)
