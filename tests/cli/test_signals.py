"""A signal while the program is still being loaded ends it as one that comes later: a line, and the signal's code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Sends the signal at the moment at which a module is imported, the first time.
SIGNALLED = """
import os, signal, sys
name, number = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, wanted, path=None, target=None):
        if wanted == name:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
sys.argv = ["sheepop", *sys.argv[3:]]
from sheepop.__main__ import main
main()
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted."), (signal.SIGTERM, "Terminated.")])
@pytest.mark.parametrize("module", ["sheepop.cli.main", "typer", "sheepop.cli.train", "sheepop.jobs.run.listing"])
def test_a_signal_while_the_program_is_loaded_ends_it_in_one_line(module: str, number: int, word: str):
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"{word}\n")


def test_ctrl_c_within_code_that_a_library_makes_has_its_exit_code():
    # Such as the methods of a data class: Python remembers a KeyboardInterrupt there and ends by the signal.
    within = SIGNALLED.replace(
        "            os.kill(os.getpid(), number)", "            exec('os.kill(os.getpid(), number)')"
    )
    command = [sys.executable, "-c", within, "sheepop.jobs.run.listing", str(int(signal.SIGINT)), "runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_a_signal_that_is_ignored_from_the_start_stays_ignored():
    ignoring = SIGNALLED.replace("signal.default_int_handler", "signal.SIG_IGN")
    for module in ("sheepop.cli.main", "sheepop.jobs.run.listing"):
        command = [sys.executable, "-c", ignoring, module, str(int(signal.SIGINT)), "runs", "/nowhere"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 3 and "/nowhere" in done.stderr
