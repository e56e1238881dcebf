"""Files on disk that may be swapped for something else while they are read."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sheepop.data.extract.interface import Content


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What changes when a file is written to or replaced."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        """The fingerprint in what ``stat`` says."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class RegularFile(Content):
    """A regular file at `location`; a pipe or device put in its place is refused and not waited for."""

    def __init__(self, name: str, location: Path) -> None:
        super().__init__(name, path=location)
        self.location = location

    def open(self) -> BinaryIO:
        """The file, positioned at the beginning; raises OSError when it is none that can be read."""
        return open_regular(self.location)

    def fingerprint(self) -> Fingerprint:
        """Of the file as it is now."""
        return Fingerprint.of(self.location.stat())


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; raises OSError for anything else, without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no longer a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
