"""Messages and progress for people, on standard error; standard output is for results, so that it can be piped.

On a terminal, progress is a live bar, with a panel below it if there are facts to show. Elsewhere it is a plain line
every few seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from sheepop.core.errors import StorageError
from sheepop.core.facts import Fact, Text, shows_time_left, visible

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

_LINE_EVERY_SECONDS = 5.0


class Progress(Protocol):
    """Counts the finished units of a task. These methods do nothing, for a task without a display."""

    def advance(self, amount: float = 1) -> None:
        """Reports `amount` more units done."""
        return

    def resize(self, total: float) -> None:
        """Replaces the total number of units."""
        return

    def describe(self, detail: str) -> None:
        """Replaces the text after the bar, or at the end of a plain line."""
        return

    def show(self, facts: Sequence[Fact | Text]) -> None:
        """Replaces the panel below a live bar; with a panel, there is no text after the bar."""
        return


class Console:
    """Messages and progress for people. `quiet` keeps only warnings; `Console.silent()` prints nothing at all."""

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None, warnings: bool = True) -> None:
        self.quiet = quiet
        self._warnings = warnings
        self._file = cast(TextIO, MessageStream(file or sys.stderr))
        self._rich: RichConsole | None = None

    @classmethod
    def silent(cls) -> Console:
        """Returns a console that prints nothing, for use as a library."""
        return cls(quiet=True, warnings=False)

    @property
    def is_terminal(self) -> bool:
        """Whether messages go to a terminal."""
        return self._file.isatty()

    @property
    def is_live(self) -> bool:
        """Whether progress is a live bar, which can have a panel; otherwise it is plain lines without one."""
        return self.is_terminal and os.environ.get("TERM") != "dumb"

    def info(self, message: str) -> None:
        """Prints a line about what is happening, unless quiet."""
        if not self.quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """Prints a warning, also if quiet."""
        if self._warnings:
            self._print(f"Warning: {message}", style="yellow")

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str = "", *, done: float = 0) -> Iterator[Progress]:
        """Shows the progress of a task; `total` is None if it is not known beforehand.

        `done` units were finished earlier: they count for the percentage, but not for the estimate of the time left.
        """
        if self.quiet:
            yield _NoProgress()
        elif self.is_live:
            from sheepop.core.live_bar import LiveBar

            with LiveBar(self._console(), description, total, unit, done) as bar:
                yield bar
        else:
            lines = _PlainProgress(self, description, total, unit, done)
            yield lines
            lines.close()

    def _print(self, message: str, style: str | None = None) -> None:
        message = visible(message)
        if self.is_terminal:
            self._console().print(message, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=self._file, flush=True)

    def _console(self) -> RichConsole:
        if self._rich is None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._file)
        return self._rich


class _NoProgress(Progress):
    """The progress of a quiet console, which shows nothing."""


class _PlainProgress(Progress):
    """Plain lines every few seconds, which have no panel."""

    def __init__(self, console: Console, description: str, total: float | None, unit: str, done: float) -> None:
        self._console, self._description, self._total, self._unit = console, description, total, unit
        self._before = self._done = self._shown = float(done)
        self._detail = ""
        self._started = self._printed = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed >= _LINE_EVERY_SECONDS:
            self._show(now)

    def resize(self, total: float) -> None:
        self._total = total

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
            finished = self._done - self._before
            progress = f"{self._done / self._total:4.0%} ({done} of {self._total:,.0f} {self._unit})"
            if shows_time_left(finished, self._total - self._before, elapsed):
                progress += f", {elapsed / finished * max(0.0, self._total - self._done):,.0f} s left"
        else:
            progress = f"{done} {self._unit}, {elapsed:,.0f} s"
        return f"{self._description}: {progress}" + (f", {self._detail}" if self._detail else "")


class MessageStream:
    """A text stream that redirects itself to the null device after a failed write, so that work continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, if it can; returns its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is in the buffer, if it can."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # The text left in the buffer would fail again when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class ResultStream(MessageStream):
    """The stream for results: without a reader the process ends quietly, as after SIGPIPE; a full disk is an error."""

    def _give_up(self, error: OSError) -> None:
        super()._give_up(error)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE)
        raise StorageError(
            f"Cannot write to standard output: {error.strerror}. Send it to a disk with free space, or to a terminal."
        ) from error
