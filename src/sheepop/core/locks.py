"""One process at a time: a lock on a directory that ends with the process that holds it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sheepop.core.errors import SheepOpError
from sheepop.core.files import storage_errors

# Some network file systems are mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def exclusive_lock(path: Path, refusal: SheepOpError) -> Iterator[bool]:
    """Holds the lock file `path`, made when it is missing; raises `refusal` when another process holds it.

    Yields False, without a lock, where the file system knows none.

    The kernel releases it when the process ends, so a killed process leaves no lock behind. The file stays: removing
    it would let a third process lock a new file of the same name beside one that still waits for the old.
    """
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
