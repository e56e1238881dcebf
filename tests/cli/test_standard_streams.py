"""Results and messages where nobody reads them any more: a closed pipe, a full disk, a terminal that is gone."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.console import Console

from ..command_line import Ended, Launcher


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def terminal_that_is_gone() -> int:
    screen, terminal = pty.openpty()
    os.close(screen)
    return terminal


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("doctor", "--json")])
def test_a_command_ends_quietly_when_nobody_reads_on(launcher: Launcher, arguments: tuple[str, ...]):
    writer = closed_pipe()
    assert launcher.run(*arguments, stdout=writer) == Ended(128 + 13, "", "")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_results_on_a_full_disk_are_an_error_that_says_so(launcher: Launcher):
    with Path("/dev/full").open("wb") as full:
        done = launcher.run("--version", stdout=full.fileno())
    assert done.code == 1 and done.err.startswith("Error: Cannot write to standard output: No space left on device.")


@pytest.mark.parametrize("gone", [closed_pipe, terminal_that_is_gone])
def test_work_goes_on_when_its_messages_reach_nobody(gone: Callable[[], int]):
    with os.fdopen(gone(), "w") as stream:
        console, done = Console(file=stream), 0
        console.info("begins")
        with console.progress("Working", 3, "steps") as progress:
            for _ in range(3):
                progress.advance()
                console.warn("look")
                done += 1
    assert done == 3
