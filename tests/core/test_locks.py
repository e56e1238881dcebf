"""A lock that another holds for a moment, and one that another keeps."""

from __future__ import annotations

import fcntl
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
