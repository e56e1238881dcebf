"""File locks that let one process at a time use a directory, and that end with the process in any case."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sheepop.core.errors import SheepOpError
from sheepop.core.files import storage_errors

# Some network file systems are mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

# Seconds between tries: `is_locked`, which a list of runs calls, holds the lock for a moment.
_PAUSES = (0.02, 0.1, 0.3)


@contextmanager
def exclusive_lock(path: Path, refusal: SheepOpError | None) -> Iterator[bool]:
    """Holds a lock on the file `path`, which is created if missing.

    If another process holds it, raises `refusal`, or waits if that is None.

    Yields False, without a lock, if the file system does not support locks.

    The kernel releases the lock when the process ends, so a killed process leaves no lock behind. The file remains,
    unless the holder of the lock removes it; a process that opened the removed file locks a new one instead.
    """
    is_locked, descriptor = False, _open(path)
    try:
        while not is_locked:
            try:
                _lock(descriptor, waits=refusal is None)
            except BlockingIOError:
                raise refusal from None  # type: ignore[misc] # without a refusal, `_lock` waits
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
            is_locked = _is_at(descriptor, path)
            if not is_locked:
                removed, descriptor = descriptor, _open(path)
                os.close(removed)
        yield is_locked
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock on `path` now; False if the file is missing or cannot be locked."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(descriptor: int, *, waits: bool) -> None:
    if waits:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    for pause in _PAUSES:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _open(path: Path) -> int:
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
