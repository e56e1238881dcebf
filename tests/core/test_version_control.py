from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sheepop.core.version_control import git_state


def git(root: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{name}": "a@b" for role in ("AUTHOR", "COMMITTER") for name in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a.txt").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "run.log").write_text("not tracked")
    (tmp_path / "below").mkdir()
    assert git_state(tmp_path / "below") == {"commit": commit, "dirty": False}
    (tmp_path / "a.txt").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_without_git_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
