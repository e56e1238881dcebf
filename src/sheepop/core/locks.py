"""One process at a time: a lock on a directory that ends with the process that holds it, however it ends."""

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

# Seconds between tries: who only asks whether a lock is held, as a list of runs does, holds it for a moment.
_PAUSES = (0.02, 0.1, 0.3)


@contextmanager
def exclusive_lock(path: Path, refusal: SheepOpError) -> Iterator[bool]:
    """Holds the lock file `path`, made with its directory when missing; raises `refusal` when another process holds it.

    Yields False, without a lock, where the file system does not support locks.

    The kernel releases it when the process ends, so a killed process leaves no lock behind. The file stays, unless
    the holder of the lock removes it; a process that had opened it by then locks the new one.
    """
    is_locked, descriptor = False, _open(path)
    try:
        while not is_locked:
            try:
                _lock(descriptor)
            except BlockingIOError:
                raise refusal from None
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
    """Whether a process holds the lock file `path` now; false where it is missing or cannot be asked."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(descriptor: int) -> None:
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
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
