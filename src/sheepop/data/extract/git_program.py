"""The git program, run so that nothing a repository says is executed, written to, or fetched."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sheepop.core.errors import DataError
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.unpacking import spooled

MEMORY_BYTES = 2**31
SECONDS = 120.0
_LONGEST_HEADER = 200

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


class BlobReader:
    """The contents of files in the repository at `path`, one after another from one ``git cat-file --batch``.

    git is ended when one takes over `seconds`, or is damaged; `is_open` is False from then on.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._seconds, self.is_open = path, seconds, True
        pipe = subprocess.PIPE
        self._process = start_git(path, "cat-file", "--batch", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        """Ends git."""
        self.is_open = False
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()

    @contextmanager
    def content(self, blob: str, name: str, scratch: Path) -> Iterator[Content]:
        """The blob with this full hash as content called `name`, for as long as the context lasts.

        Raises `ExtractionError`: ``missing`` when the repository does not hold it, ``damaged``, ``timeout``.
        """
        begin, limit = time.monotonic(), threading.Timer(self._seconds, self._process.kill)
        limit.start()
        try:
            source = self._requested(blob)
            with spooled(source, name, source.left, scratch) as content:
                limit.cancel()
                yield content
        except _StoppedError:
            self.close()
            if time.monotonic() - begin >= self._seconds:
                raise ExtractionError("timeout", f"git did not send it within {self._seconds:g} s") from None
            raise ExtractionError("damaged", "git cannot read it") from None
        finally:
            limit.cancel()

    def _requested(self, blob: str) -> _Blob:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(f"{blob}\n".encode("ascii"))
            stdin.flush()
        except OSError:
            raise _StoppedError from None
        fields = stdout.readline(_LONGEST_HEADER).split()
        if fields[1:2] == [b"missing"]:
            raise ExtractionError("missing", "the repository does not have this version of it")
        if len(fields) != 3 or fields[1] != b"blob":
            raise _StoppedError
        return _Blob(stdout, int(fields[2]))


class _StoppedError(Exception):
    """git has ended, or says what it should not."""


class _Blob:
    """The bytes of one blob on their way from git, which a line end follows."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream, self.left = stream, size

    def read(self, count: int, /) -> bytes:
        count = min(count, self.left)
        data = self._stream.read(count)
        self.left -= count
        if len(data) < count or (not count and self._stream.read(1) != b"\n"):
            raise _StoppedError
        return data
