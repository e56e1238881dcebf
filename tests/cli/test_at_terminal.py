"""What a person at a terminal sees and types, in a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sheepop

from ..command_line import Ended, Launcher, Started

SECONDS = 60
_INVISIBLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\x01|\x02")


class Screen:
    """A terminal with a program in it, and all that it has shown."""

    def __init__(self, number: int, program: Started) -> None:
        self.shown, self.program = "", program
        self._number, self._raw = number, b""

    def type(self, text: str) -> None:
        os.write(self._number, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Reads on until `text` was shown so often."""
        until = time.monotonic() + SECONDS
        while self.shown.count(text) < times:
            self._read(until)

    def wait_for_more_than(self, text: str) -> None:
        """Reads on until something follows `text`."""
        until = time.monotonic() + SECONDS
        while not self.shown.partition(text)[2]:
            self._read(until)

    def _read(self, until: float) -> None:
        assert time.monotonic() < until, f"nothing more comes behind:\n{self.shown}"
        if select.select([self._number], [], [], 0.1)[0]:
            self._raw += os.read(self._number, 65536)
            # What colours and edits a line is left out.
            self.shown = _INVISIBLE.sub("", self._raw.decode(errors="replace"))

    def interrupt(self, *, prompts: int) -> None:
        """Presses Ctrl-C until so many prompts were shown; one that comes just before Python waits is seen late."""
        for _ in range(SECONDS):
            self.program.send_signal(signal.SIGINT)
            until = time.monotonic() + 1
            while time.monotonic() < until:
                if self.shown.count("> ") >= prompts:
                    return
                self._read(until + SECONDS)

    def leave(self) -> Ended:
        """Presses Ctrl-D, which only a program that waits for a line understands."""
        self.type("\x04")
        return self.program.wait(SECONDS)


@contextmanager
def terminal(launcher: Launcher, *arguments: object) -> Iterator[Screen]:
    screen, inner = pty.openpty()
    program = launcher.start(*arguments, terminal=inner)
    try:
        yield Screen(screen, program)
    finally:
        program.kill()
        os.close(inner)
        os.close(screen)


def test_a_chat_at_a_terminal(launcher: Launcher, trained: Path, tmp_path: Path) -> None:
    with terminal(launcher, "chat", trained, "--max-new-tokens", "100000", "--temperature", "0") as screen:
        screen.wait_for("> ")
        assert "no chat template" in screen.shown
        screen.type("/he\t\n")
        screen.wait_for("> ", times=2)
        assert "/again " in screen.shown
        screen.type("Schäfchen\n")
        screen.wait_for_more_than("Schäfchen\n")
        screen.interrupt(prompts=3)
        assert "[stopped]" in screen.shown
        screen.type(f"/save '{tmp_path}/talk.json'\n")
        screen.wait_for("> ", times=4)
        screen.type("not sent")
        screen.wait_for("not sent")
        screen.interrupt(prompts=5)
        screen.type("/load nowhere.json\n")
        screen.wait_for("> ", times=6)
        assert "nowhere.json is missing" in screen.shown
        assert screen.leave().code == 0
    user, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert user == {"role": "user", "content": "Schäfchen"}
    count = len(answer["content"])
    written = sheepop.load(trained, device="cpu").generate("Schäfchen", max_new_tokens=count, window=True, greedy=True)
    assert written.text.startswith(answer["content"])


@pytest.mark.system
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_chat_as_a_real_terminal_draws_it(trained: Path, tmp_path: Path) -> None:
    """The screen of tmux, eighty columns wide: prompts, answers that wrap, history, and commands."""
    expected = sheepop.load(trained, device="cpu").generate("Sheep", max_new_tokens=200, window=True, greedy=True).text
    tmux = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    chat = [sys.executable, "-m", "sheepop", "chat", str(trained), "--max-new-tokens", "200", "--temperature", "0"]

    def screen() -> list[str]:
        shown = subprocess.run([*tmux, "capture-pane", "-p", "-S", "-"], capture_output=True, text=True, check=True)
        return shown.stdout.rstrip("\n").split("\n")

    def wait_for(prompts: int) -> list[str]:
        """Until the last of so many prompts stands alone on its line."""
        until = time.monotonic() + SECONDS
        while True:
            lines = screen()
            if sum(line.startswith(">") for line in lines) == prompts and lines[-1].rstrip() == ">":
                return lines
            assert time.monotonic() < until, lines
            time.sleep(0.1)

    def keys(*typed: str) -> None:
        subprocess.run([*tmux, "send-keys", *typed], check=True)

    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "40", shlex.join(chat)], check=True)
    try:
        wait_for(1)
        keys("Sheep", "Enter")
        lines = wait_for(2)
        asked = next(place for place, line in enumerate(lines) if line.startswith("> Sheep"))
        answer = "".join("".join(lines[asked + 1 : -1]).split())  # where lines wrap says nothing of spaces
        assert answer.startswith("".join(expected.split())[:100])
        keys("/again", "Enter")
        wait_for(3)
        keys("/system Be brief.", "Enter")
        wait_for(4)
        keys("/system", "Enter")
        assert "Be brief." in wait_for(5)[-2]
        keys("Up", "Up")
        until = time.monotonic() + SECONDS
        while screen()[-1].rstrip() != "> /system Be brief.":
            assert time.monotonic() < until, screen()
            time.sleep(0.1)
        keys("C-u")
        keys("/clear", "Enter")
        wait_for(6)
        keys("/quit", "Enter")
        until = time.monotonic() + SECONDS
        while subprocess.run([*tmux, "has-session"], capture_output=True, check=False).returncode == 0:
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True, check=False)


def test_prompts_are_asked_for_at_a_terminal(launcher: Launcher, trained: Path) -> None:
    with terminal(launcher, "generate", trained, "--window", "--max-new-tokens", "100000", "--greedy") as screen:
        screen.wait_for("> ")
        screen.type("Sheep\n")
        screen.wait_for_more_than("Sheep\n")
        screen.interrupt(prompts=2)
        screen.type("\n")
        screen.wait_for("> ", times=3)
        assert screen.leave().code == 0
