"""The live bar of a terminal and the panel of facts below it, redrawn a few times a second and on every resize."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, OverflowMethod, RenderResult
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text as RichText

from sheepop.core.facts import Fact, Text, shows_time_left, visible, visible_line

_REDRAWS_PER_SECOND = 4
_BAR_WIDTH = 24
_SHORTEST_BAR = 6
_COLUMNS_BESIDE_PANEL = 3  # description, bar, percentage: the panel shows the rest
_COLUMN_WIDTH = 24  # of a label and its value
_WIDEST_PANEL = 118
_MOST_LINES = 6  # of a text
_FRAME_WIDTH = 4  # borders and padding
_ECHO_WIDTH = 3  # room for the ^C that a terminal writes after the last line on Ctrl-C


class LiveBar:
    """A bar that is drawn while the block runs, and then removed."""

    def __init__(self, console: RichConsole, description: str, total: float | None, unit: str, done: float = 0) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TaskProgressColumn(),
            _TimeLeft(done),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(description, total=total, detail=unit)
        self._progress.update(self._task, completed=done)
        self._width_before_detail = len(f"{description}  100% 0:00:00 ") + _SHORTEST_BAR
        self._facts: Sequence[Fact | Text] = ()
        self._live = _ResizedLive(
            get_renderable=self._render, console=console, refresh_per_second=_REDRAWS_PER_SECOND, transient=True
        )

    def __enter__(self) -> LiveBar:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def advance(self, amount: float = 1) -> None:
        """Reports `amount` more units done."""
        self._progress.advance(self._task, amount)

    def resize(self, total: float) -> None:
        """Replaces the total number of units."""
        self._progress.update(self._task, total=total)

    def describe(self, detail: str) -> None:
        """Replaces the text after the bar, unless a panel is shown."""
        # On a narrow terminal the end of the detail is cut, not the percentage.
        room = max(0, self._console.width - self._width_before_detail - _ECHO_WIDTH)
        self._progress.update(self._task, detail="" if self._facts else visible(detail)[:room])

    def show(self, facts: Sequence[Fact | Text]) -> None:
        """Replaces the panel, which should include the time left, since the bar then omits it."""
        self._facts = tuple(facts)
        if self._facts:
            self._progress.update(self._task, detail="")
            self._progress.columns = self._progress.columns[:_COLUMNS_BESIDE_PANEL]

    def _render(self) -> Group:
        panel = [FactPanel(self._facts)] if self._facts else []
        return Group(self._progress.get_renderable(), *panel)


class _TimeLeft(TimeRemainingColumn):
    """The time left, once enough is done to tell; `before` units were done earlier."""

    def __init__(self, before: float) -> None:
        super().__init__(compact=True)
        self._before = before

    def render(self, task: Task) -> RichText:
        """Returns the time, or nothing."""
        finished, total = task.completed - self._before, (task.total or 0) - self._before
        return super().render(task) if shows_time_left(finished, total, task.elapsed or 0) else RichText()


class FactPanel:
    """Facts in as many columns as fit the width; below them wide facts, each on own lines, and texts side by side."""

    def __init__(self, facts: Sequence[Fact | Text]) -> None:
        self._facts = [fact for fact in facts if isinstance(fact, Fact)]
        self._texts = [fact for fact in facts if isinstance(fact, Text)]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width - _ECHO_WIDTH, _WIDEST_PANEL)
        num_columns = max(1, (width - _FRAME_WIDTH) // _COLUMN_WIDTH)
        narrow = [fact for fact in self._facts if not fact.wide]
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _ in range(num_columns):
            grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for start in range(0, len(narrow), num_columns):
            grid.add_row(*(_line(fact) for fact in narrow[start : start + num_columns]))
        beside = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _ in self._texts:
            beside.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        beside.add_row(*(_lines(text) for text in self._texts))
        lines = [_line(fact, wraps=True) for fact in self._facts if fact.wide]
        parts = Group(grid, *lines, *([beside] if self._texts else []))
        yield Panel(parts, width=width, border_style="dim", padding=(0, 1))


class _ResizedLive(Live):
    """A live display that clears the screen after the terminal was made narrower.

    The terminal then wraps the lines drawn before, and the number of rows that they take is unknown.
    """

    _drawn_width = 0

    def refresh(self) -> None:
        """Draws the display again."""
        width = self.console.width
        if width < self._drawn_width:
            self.console.control(Control.clear(), Control.home())
        self._drawn_width = width
        super().refresh()


def _line(fact: Fact, *, wraps: bool = False) -> RichText:
    value = visible_line(fact.value.replace("\t", " "))
    overflow: OverflowMethod = "fold" if wraps else "ellipsis"
    return RichText.assemble((f"{fact.label} ", "dim"), value, no_wrap=not wraps, overflow=overflow)


def _lines(text: Text) -> RichText:
    """Returns the label and the first lines of a text, unwrapped."""
    lines = [f"\n{visible_line(line)}" for line in text.value.expandtabs(4).splitlines()[:_MOST_LINES]]
    return RichText.assemble((text.label, "dim"), *lines, no_wrap=True, overflow="ellipsis")
