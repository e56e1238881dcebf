"""What a person sees while work goes on: messages and progress, on standard error.

On a terminal progress is a live bar; elsewhere it is one plain line every few seconds. Standard output is left
to results, so that it can be piped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_EVERY_SECONDS = 5.0
_BAR_WIDTH = 24
_SHORTEST_BAR = 6
# File names and samples may hold escape sequences that would move a terminal's cursor or change its title.
_VISIBLE_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Progress(Protocol):
    """Counts finished units of one piece of work."""

    def advance(self, amount: float = 1) -> None:
        """Reports `amount` more units done."""

    def describe(self, detail: str) -> None:
        """Replaces the words shown behind the bar."""


class Console:
    """Messages and progress for people. `quiet` keeps only warnings; `Console.silent()` prints nothing at all."""

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None, warnings: bool = True) -> None:
        self.quiet = quiet
        self._warnings = warnings
        self._file = file or sys.stderr
        self._rich: RichConsole | None = None

    @classmethod
    def silent(cls) -> Console:
        """A console that prints nothing, for use as a library."""
        return cls(quiet=True, warnings=False)

    @property
    def is_terminal(self) -> bool:
        """Whether a person is watching live."""
        return self._file.isatty()

    def info(self, message: str) -> None:
        """A line about what is happening; absent when quiet."""
        if not self.quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """A line about something the user should know even when quiet."""
        if self._warnings:
            self._print(f"Warning: {message}", style="yellow")

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str = "") -> Iterator[Progress]:
        """Shows the progress of one piece of work; `total` is None when it is not known beforehand."""
        if self.quiet:
            yield _NoProgress()
        elif self.is_terminal and os.environ.get("TERM") != "dumb":
            with self._live_bar(description, total, unit) as bar:
                yield bar
        else:
            lines = _PlainProgress(self, description, total, unit)
            yield lines
            lines.close()

    @contextmanager
    def _live_bar(self, description: str, total: float | None, unit: str) -> Iterator[Progress]:
        from rich import progress as rich_progress

        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=_BAR_WIDTH),
            rich_progress.TaskProgressColumn(),
            rich_progress.TimeRemainingColumn(compact=True),
            rich_progress.TextColumn("{task.fields[detail]}"),
        )
        with rich_progress.Progress(*columns, console=self._console(), transient=True) as live:
            yield _LiveProgress(live, live.add_task(description, total=total, detail=unit), description)

    def _print(self, message: str, style: str | None = None) -> None:
        message = message.translate(_VISIBLE_CONTROLS)
        if self.is_terminal:
            self._console().print(message, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=self._file, flush=True)

    def _console(self) -> RichConsole:
        if self._rich is None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._file)
        return self._rich


class _NoProgress:
    def advance(self, amount: float = 1) -> None:
        """Nothing is shown."""

    def describe(self, detail: str) -> None:
        """Nothing is shown."""


class _LiveProgress:
    def __init__(self, live: RichProgress, task: TaskID, description: str) -> None:
        self._live, self._task = live, task
        self._width_before_detail = len(f"{description}  100% 0:00:00 ") + _SHORTEST_BAR

    def advance(self, amount: float = 1) -> None:
        self._live.advance(self._task, amount)

    def describe(self, detail: str) -> None:
        # On a narrow terminal the end of the detail gives way, not the share that is done.
        room = max(0, self._live.console.width - self._width_before_detail)
        self._live.update(self._task, detail=detail[:room])


class _PlainProgress:
    def __init__(self, console: Console, description: str, total: float | None, unit: str) -> None:
        self._console, self._description, self._total, self._unit = console, description, total, unit
        self._done, self._shown, self._detail = 0.0, 0.0, ""
        self._started = self._printed = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY_SECONDS:
            self._show(now)

    def describe(self, detail: str) -> None:
        self._detail = detail

    def close(self) -> None:
        if self._printed > self._started and self._done != self._shown:
            self._show(time.monotonic())

    def _show(self, now: float) -> None:
        self._printed, self._shown = now, self._done
        self._console.info(self._line(now))

    def _line(self, now: float) -> str:
        elapsed = now - self._started
        done = f"{self._done:,.0f}"
        if self._total:
            share = self._done / self._total
            remaining = elapsed / share - elapsed if share > 0 else 0.0
            progress = f"{share:4.0%} ({done} of {self._total:,.0f} {self._unit}), {remaining:,.0f} s left"
        else:
            progress = f"{done} {self._unit}, {elapsed:,.0f} s"
        return f"{self._description}: {progress}" + (f", {self._detail}" if self._detail else "")
