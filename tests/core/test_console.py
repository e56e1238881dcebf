from __future__ import annotations

import io
import re
import sys

import pytest

from sheepop.core import console as console_module
from sheepop.core.console import Console


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


@pytest.mark.parametrize(
    ("columns", "expected"), [("40", "loss 3.913"), ("200", "loss 3.913  norm 0.63  123 tokens/s")]
)
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
