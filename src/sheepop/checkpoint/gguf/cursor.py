"""A place in the bytes of a file, which never moves beyond their end."""

from __future__ import annotations

import struct
from pathlib import Path

from sheepop.core.errors import CheckpointError


class Cursor:
    """Reads little-endian numbers and runs of bytes from `content`, the bytes of `path`."""

    def __init__(self, content: memoryview, path: Path) -> None:
        self.position = 0
        self._content = content
        self._path = path

    @property
    def left(self) -> int:
        """Bytes between here and the end."""
        return len(self._content) - self.position

    def take(self, size: int, what: str) -> bytes:
        """A copy of the next `size` bytes; raises `CheckpointError`, naming `what` they were, when there are fewer."""
        if size > self.left:
            raise self.problem(f"{what} needs {size:,} bytes, and only {self.left:,} are left")
        start = self.position
        self.position += size
        return bytes(self._content[start : self.position])

    def u32(self, what: str) -> int:
        """A whole number of 4 bytes."""
        number: int = struct.unpack("<I", self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """A whole number of 8 bytes."""
        number: int = struct.unpack("<Q", self.take(8, what))[0]
        return number

    def problem(self, reason: str) -> CheckpointError:
        """The error that names the file, the place in it and the reason."""
        return CheckpointError(
            f"{self._path} is damaged or no GGUF file: at byte {self.position:,}, {reason}. Copy or download it again."
        )

    def unread(self, what: str, remedy: str) -> CheckpointError:
        """The error for a file that may be sound, but of a kind that is not read."""
        return CheckpointError(f"{self._path} {what}. {remedy}.")
