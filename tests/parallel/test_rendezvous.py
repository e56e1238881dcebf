"""Ranks that do not come: the others end, and one of them says who is missing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ..command_line import in_process
from .conftest import Together
from .test_launch import children_of

GONE = "import os; os._exit(9)"  # before it meets the others


def test_who_is_missing_is_said_once(together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHEEPOP_ARRIVAL", "10")
    options = together.options(tmp_path / "run")
    three, two = together.start(3, options, program_2=GONE), together.start(2, options, program_0=GONE)
    first, second, third = (rank.wait() for rank in three)
    assert (first.code, second.code, third.code) == (2, 2, 9), (first, second)
    (said,) = [end.err for end in (first, second) if end.err]
    assert "Of 3 ranks rank 2 did not come within 10 seconds (SHEEPOP_ARRIVAL)" in said
    gone, ended = (rank.wait() for rank in two)
    assert (gone.code, ended.code) == (9, 2)
    assert ended.err.startswith("Error: The 2 ranks did not find each other at 127.0.0.1:"), ended


def test_a_rank_that_dies_before_it_arrives_ends_all(together: Together, tmp_path: Path) -> None:
    process = together.launcher.start("launch", "-n", "2", *together.options(tmp_path / "run"))
    while len(started := children_of(process.pid)) < 2:
        assert process.poll() is None, process.poll()
        time.sleep(0.001)
    os.kill(max(started), signal.SIGKILL)
    ended = process.wait()
    assert ended.code == 1
    assert ended.err.count("was ended by SIGKILL, and the others with it") == ended.err.count("Error") == 1, ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seconds", ["soon", "0", "nan"])
def test_a_time_that_is_none_is_refused(seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SHEEPOP_ARRIVAL", seconds)
    ended = in_process("train", "--data", tmp_path, "--output", tmp_path / "run")
    assert ended.code == 2
    assert f"SHEEPOP_ARRIVAL = {seconds}, which must be a number of seconds above 0" in ended.err
