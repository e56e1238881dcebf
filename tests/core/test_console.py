from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console as RichConsole

from sheepop.core import console as console_module
from sheepop.core.console import Console
from sheepop.core.facts import Fact, Text
from sheepop.core.live_bar import FactPanel, LiveBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    return clock


def test_messages_go_to_standard_error_as_plain_lines(capsys: pytest.CaptureFixture[str]):
    console = Console()
    console.info("reading [bold]x[/bold]")
    console.warn("disk is slow")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "reading [bold]x[/bold]\nWarning: disk is slow\n"


def test_quiet_keeps_warnings_and_silent_keeps_nothing():
    quiet_file, silent_file = io.StringIO(), io.StringIO()
    quiet = Console(quiet=True, file=quiet_file)
    silent = Console(quiet=True, warnings=False, file=silent_file)
    for console in (quiet, silent):
        console.info("info")
        console.warn("look")
        with console.progress("Working", 10) as progress:
            progress.advance()
            progress.describe("detail")
    assert quiet_file.getvalue() == "Warning: look\n"
    assert silent_file.getvalue() == ""


@pytest.mark.parametrize(("columns", "expected"), [("40", "loss 3.9"), ("200", "loss 3.913  norm 0.63  123 tokens/s")])
def test_on_a_narrow_terminal_the_share_stays_and_the_detail_is_cut(
    monkeypatch: pytest.MonkeyPatch, columns: str, expected: str
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Console(file=file).progress("Training", 100, "steps") as progress:
        progress.advance(30)
        progress.describe("loss 3.913  norm 0.63  123 tokens/s")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue().rsplit("\r\x1b[2KTraining", 1)[1])
    assert " 30% " in last
    assert expected in last and last.split("loss")[1].strip() == expected.split("loss")[1].strip()


def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    with Console(file=file).progress("Training", 10, "steps") as progress:
        clock.now += 6
        progress.advance(5)
    assert file.getvalue() == "Training:  50% (5 of 10 steps), 6 s left\n"


def test_silent_prints_nothing(capsys: pytest.CaptureFixture[str]):
    Console.silent().warn("look")
    assert capsys.readouterr() == ("", "")


def test_progress_away_from_a_terminal_is_a_line_every_five_seconds(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Reading", 1_000, "files") as progress:
        clock.now += 4.9
        progress.advance(100)
        clock.now += 0.1
        progress.describe("data.txt")
        progress.advance(150)
        clock.now += 15
        progress.advance(750)
    assert file.getvalue().splitlines() == [
        "Reading:  25% (250 of 1,000 files), 15 s left, data.txt",
        "Reading: 100% (1,000 of 1,000 files), 0 s left, data.txt",
    ]


def test_a_task_that_was_longer_than_expected_has_no_time_left(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Compressing", 10.0, "MB") as progress:
        clock.now += 6
        progress.advance(10.01)
    assert file.getvalue() == "Compressing: 100% (10 of 10 MB), 0 s left\n"


def test_the_time_left_is_shown_once_enough_is_done_to_tell_it(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Reading", 1_000, "MB", done=500) as progress:
        for amount, seconds in ((10, 30), (14, 25), (1, 5), (475, 40)):
            clock.now += seconds
            progress.advance(amount)
    assert file.getvalue().splitlines() == [
        "Reading:  51% (510 of 1,000 MB)",
        "Reading:  52% (524 of 1,000 MB)",
        "Reading:  52% (525 of 1,000 MB), 1,140 s left",
        "Reading: 100% (1,000 of 1,000 MB), 0 s left",
    ]


def test_the_end_is_told_once(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Reading", 10, "files") as progress:
        clock.now += 6
        progress.advance(5)
        clock.now += 1
        progress.advance(5)
    assert file.getvalue().splitlines() == [
        "Reading:  50% (5 of 10 files), 6 s left",
        "Reading: 100% (10 of 10 files), 0 s left",
    ]


def test_progress_without_a_known_total_counts(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Reading", None, "files") as progress:
        clock.now += 6
        progress.advance(3)
    assert file.getvalue().splitlines() == ["Reading: 3 files, 6 s"]


def test_short_work_prints_no_progress(clock: Clock):
    file = io.StringIO()
    with Console(file=file).progress("Reading", 10) as progress:
        clock.now += 1
        progress.advance(10)
    assert file.getvalue() == ""


def test_a_terminal_gets_no_escape_sequence_from_a_message():
    terminal = Terminal()
    Console(file=terminal).info("file \x1b]0;owned\x07\r name é")
    assert terminal.getvalue() == "file \\x1b]0;owned\\x07\\x0d name é\n"


def test_a_terminal_shows_a_live_bar():
    terminal = Terminal()
    with Console(file=terminal).progress("Reading", 4, "files") as progress:
        progress.advance(4)
        progress.describe("the end")
    assert "Reading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_rich_is_not_loaded_for_plain_lines():
    import subprocess

    program = (
        "import sys; from sheepop.core.console import Console; c = Console(); c.info('x')\n"
        "with c.progress('y', 3) as p: p.advance()\n"
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


FACTS = [
    Fact("Loss", "3.9134"),
    Fact("Gradient norm", "0.630"),
    Fact("Tokens/s", "12,345"),
    Fact("Held out", "a long line that says how well the model does " * 3, wide=True),
    Fact("Sample", "\x1b[31mred\x07\nnext", wide=True),
]


def panel(width: int, facts: Sequence[Fact | Text] = FACTS) -> list[str]:
    file = io.StringIO()
    RichConsole(file=file, width=width, force_terminal=True, color_system=None).print(FactPanel(facts))
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "rows"), [(80, 1), (60, 2), (30, 3)])
def test_facts_stand_in_as_many_columns_as_fit(width: int, rows: int) -> None:
    lines = panel(width, [*FACTS[:3], Fact("MFU", "1%", wide=True)])
    assert len(lines) == 2 + rows + 1
    assert {len(line) for line in lines} == {width - 3}  # room for what Ctrl-C writes
    assert re.findall(r"Loss 3\.9134|Gradient norm 0\.630|Tokens/s 12,345", " ".join(lines)) == [
        "Loss 3.9134",
        "Gradient norm 0.630",
        "Tokens/s 12,345",
    ]


@pytest.mark.parametrize("width", [80, 40])
def test_a_wide_fact_is_whole_on_a_narrow_terminal_and_moves_no_cursor(width: int) -> None:
    wide = [*FACTS[3:], Fact("Curve", "▁▂▃▄▅▆▇█" * 8, wide=True)]
    rows = [line.strip("│ ") for line in panel(width, wide)[1:-1] if line.strip("│ ")]
    words = " ".join(rows)
    assert words.startswith(f"Held out {('a long line that says how well the model does ' * 3).strip()} Sample ")
    assert "Sample \\x1b[31mred\\x07⏎next" in words
    assert words.rpartition("next")[2].replace(" ", "") == "Curve" + "▁▂▃▄▅▆▇█" * 8
    assert all(len(row) <= width - 7 for row in rows)


def test_texts_stand_side_by_side_in_their_lines() -> None:
    texts = [Text("Step 0", "a\tb\n\x1b[2Jc"), Text("Step 9", "one\ntwo\n" + "more\n" * 9)]
    rows = [line[2:-2].rstrip() for line in panel(60, [Fact("Step", "1"), *texts])[2:-1]]
    columns = [(row[: rows[0].index("Step 9")].rstrip(), row[rows[0].index("Step 9") :]) for row in rows]
    assert columns[:3] == [("Step 0", "Step 9"), ("a   b", "one"), ("\\x1b[2Jc", "two")]
    assert len(columns) == 1 + 6


def test_a_panel_is_drawn_below_the_bar_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Console(file=file).progress("Training", 100, "steps", done=40) as progress:
        progress.advance(2)
        progress.describe("words that the panel replaces")
        progress.show(FACTS)
        progress.describe("words that the panel replaces")
    last = file.getvalue().rsplit("Training", 1)[1]
    assert "42%" in last and "Loss " in last and "words" not in last
    assert file.getvalue().endswith("\x1b[1A\x1b[2K" * 6)  # every line of it is erased
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h")


def test_a_terminal_made_narrower_is_drawn_on_an_empty_screen() -> None:
    file = Terminal()
    console = RichConsole(file=file, width=80, height=24, force_terminal=True)
    with LiveBar(console, "Training", 10, "steps") as bar:
        bar.show(FACTS)
        bar._live.refresh()
        assert "\x1b[2J" not in file.getvalue()
        console.width = 60
        bar._live.refresh()
        assert file.getvalue().count("\x1b[2J\x1b[H") == 1
        console.width = 100
        bar._live.refresh()
    assert file.getvalue().count("\x1b[2J\x1b[H") == 1


def test_lines_count_the_time_of_this_session_for_what_is_left(clock: Clock) -> None:
    file = io.StringIO()
    with Console(file=file).progress("Training", 100, "steps", done=80) as progress:
        clock.now += 10
        progress.advance(5)
        progress.show(FACTS)
    assert file.getvalue().splitlines() == ["Training:  85% (85 of 100 steps), 30 s left"]
