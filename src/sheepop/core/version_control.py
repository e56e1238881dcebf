"""Finds the git revision of the user's own files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sheepop.core.machine import program_output

_SECONDS = 20.0


def git_state(place: str | Path = ".") -> dict[str, Any] | None:
    """Returns the commit checked out at `place`, and whether a tracked file differs from it.

    Returns None outside a repository, before its first commit, and if git is missing or does not answer.
    """
    commit = _git(place, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(place, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(place: str | Path, *arguments: str) -> str | None:
    """Returns the output of git, or None if git is missing, fails or takes too long."""
    # Reading the state must neither start a file-system monitor nor take the repository's lock.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(place), *arguments]
    environment = {**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    return program_output(command, seconds=_SECONDS, env=environment)
