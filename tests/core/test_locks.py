"""A lock that another holds for a moment, and one that another keeps."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.core import locks
from sheepop.core.errors import UsageError
from sheepop.core.locks import exclusive_lock


def test_who_only_looks_for_a_moment_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"
    path.touch()
    with path.open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: looking.close())
        with exclusive_lock(path, UsageError("taken")) as is_locked:
            assert is_locked


def test_who_keeps_the_lock_keeps_others_out_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".lock"
    with (
        exclusive_lock(path, UsageError("taken")),
        pytest.raises(UsageError, match="taken"),
        exclusive_lock(path, UsageError("taken")),
    ):
        pass
    with exclusive_lock(path, UsageError("taken")) as is_locked:
        assert is_locked


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_file_that_is_removed_before_it_is_locked_is_not_the_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    path, flock, removed = tmp_path / ".lock", fcntl.flock, []

    def removed_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(path.stat().st_ino)
            path.unlink()
            if is_made_again:
                path.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with exclusive_lock(path, UsageError("taken")) as is_locked, path.open("rb") as other:
        assert is_locked
        with pytest.raises(BlockingIOError):
            flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert removed


HOLDER = """
import sys, time
from pathlib import Path
from sheepop.core.errors import UsageError
from sheepop.core.locks import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), UsageError("taken")):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_keeps_this_one_out_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(UsageError, match="taken"), exclusive_lock(path, UsageError("taken")):
                pytest.fail("two processes hold the lock")
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    with exclusive_lock(path, UsageError("taken")) as is_locked:
        assert is_locked


def test_where_the_file_system_knows_no_locks_none_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with exclusive_lock(tmp_path / ".lock", UsageError("taken")) as is_locked:
        assert not is_locked


def test_a_lock_that_fails_otherwise_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", failing)
    with (
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
        exclusive_lock(tmp_path / ".lock", UsageError("taken")),
    ):
        pytest.fail("nobody knows who holds the lock")
