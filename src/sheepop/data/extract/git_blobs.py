"""The contents of files in a git repository, one after another from one ``git cat-file --batch``."""

from __future__ import annotations

import os
import select
import subprocess
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sheepop.data.extract.git_program import start_git
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.spool import spooled

_BLOCK = 2**20
_LONGEST_HEADER = 200


class BlobReader:
    """Reads blobs of the repository at `path`; git starts with the first and is waited for `seconds` at a time."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._seconds = path, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], int], BlobReader] | None = None

    @contextmanager
    def content(self, blob: str, name: str, scratch: Path) -> Iterator[Content]:
        """The blob with this full hash as content called `name`, for as long as the context lasts.

        Raises `ExtractionError`: ``missing`` when the repository does not hold it, ``damaged``, ``timeout``.
        """
        source = self._request(blob)
        with spooled(source, name, source.left, scratch) as content:
            if source.read_end() != b"\n":
                raise self._failure("damaged", "git stopped in the middle of it")
            yield content

    def close(self) -> None:
        """Ends git."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _request(self, blob: str) -> _Blob:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{blob}\n".encode("ascii"))
            process.stdin.flush()
        except OSError:
            raise self._failure("damaged", "git stopped before it was asked for") from None
        fields = self._header(process.stdout.fileno()).split()
        if fields[1:2] == [b"missing"]:
            raise ExtractionError("missing", "the repository does not have this version of it")
        if len(fields) != 3 or fields[1] != b"blob":
            raise self._failure("damaged", "git cannot read it")
        return _Blob(self, process.stdout.fileno(), int(fields[2]))

    def _header(self, descriptor: int) -> bytes:
        header = b""
        while not header.endswith(b"\n") and len(header) < _LONGEST_HEADER:
            byte = self.read(descriptor, 1)
            if not byte:
                raise self._failure("damaged", "git cannot read it")
            header += byte
        return header

    def read(self, descriptor: int, count: int) -> bytes:
        """What git has written, at most `count` bytes; raises `ExtractionError` when it writes nothing in time."""
        deadline = time.monotonic() + self._seconds
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                raise self._failure("timeout", f"git sent none of it within {self._seconds:g} s")
        return os.read(descriptor, count)

    def _failure(self, reason: str, detail: str) -> ExtractionError:
        self.close()
        return ExtractionError(reason, detail)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = start_git(
                self.path, "cat-file", "--batch", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
            )
            self._end = weakref.finalize(self, _end, self._process, os.getpid())
        return self._process


class _Blob:
    """The bytes of one blob on their way from git."""

    def __init__(self, reader: BlobReader, descriptor: int, size: int) -> None:
        self._reader, self._descriptor, self.left = reader, descriptor, size

    def read(self, count: int, /) -> bytes:
        data = self._reader.read(self._descriptor, min(count, self.left, _BLOCK)) if self.left else b""
        self.left -= len(data)
        return data

    def read_end(self) -> bytes:
        return self._reader.read(self._descriptor, 1) if not self.left else b""


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    # A forked copy of the owner must not end what belongs to the owner.
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
