"""The git program, run so that nothing a repository says is executed, written to, or fetched."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError

MEMORY_BYTES = 2**31
SECONDS = 120.0

_SETTINGS = {
    # Named by the user, so it may belong to somebody else; nothing of it is executed.
    "safe.directory": "*",
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.attributesFile": os.devnull,
    "core.splitIndex": "false",
    "core.untrackedCache": "false",
    "core.quotePath": "false",
    "protocol.allow": "never",
}
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_PAGER": "cat",
    "HOME": os.devnull,
    "LC_ALL": "C",
}


def start_git(
    repository: Path, *arguments: str, environment: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Starts a git command in `repository`, with bounded memory; raises `DataError` when git is not installed."""
    # A folder inside a repository is not taken for that repository.
    ceiling = {"GIT_CEILING_DIRECTORIES": str(repository.resolve().parent)}
    settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
    try:
        process = subprocess.Popen(
            ["git", "--no-pager", *settings, "-C", str(repository), *arguments],
            env={"PATH": os.environ.get("PATH", os.defpath), **_ENVIRONMENT, **ceiling, **(environment or {})},
            start_new_session=True,
            **streams,
        )
    except FileNotFoundError:
        raise DataError("Reading a git repository needs the program git. Install it and try again.") from None
    if sys.platform == "linux":
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    return process


def git_output(
    repository: Path, *arguments: str, data: bytes = b"", environment: Mapping[str, str] | None = None
) -> bytes:
    """What a git command prints; raises `DataError` with git's own words when it fails or takes too long."""
    pipe = subprocess.PIPE
    with start_git(repository, *arguments, environment=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            output, errors = process.communicate(data, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DataError(f"git {arguments[0]} in {repository} did not finish within {SECONDS:g} s.") from None
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        words = errors.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise DataError(f"git {arguments[0]} failed in {repository}: {words[-1].removeprefix('fatal: ')}.")
    return bytes(output)
