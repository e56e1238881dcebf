"""An array of numbers on disk, read and written by position, for what would outgrow memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors

_WORD = np.dtype("<u8")


class NumberFile:
    """64-bit numbers in a new file at `path`; what was never written is 0. Close it to remove the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.size = 0

    def append(self, numbers: NDArray[np.uint64]) -> None:
        """Writes numbers behind the last one."""
        self.write(self.size, numbers)

    def write(self, start: int, numbers: NDArray[np.uint64]) -> None:
        """Writes numbers from position `start` on."""
        data = memoryview(numbers.astype(_WORD, copy=False).tobytes())
        offset = start * _WORD.itemsize
        with storage_errors(self._path):
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
        self.size = max(self.size, start + len(numbers))

    def read(self, start: int, count: int) -> NDArray[np.uint64]:
        """The `count` numbers from position `start` on."""
        pieces, missing, offset = [], count * _WORD.itemsize, start * _WORD.itemsize
        while missing:
            piece = os.pread(self._descriptor, missing, offset)
            if not piece:
                raise DataError(f"{self._path} got shorter while it was in use. Run the command again.")
            pieces.append(piece)
            missing, offset = missing - len(piece), offset + len(piece)
        return np.frombuffer(b"".join(pieces), _WORD).astype(np.uint64, copy=False)

    def at(self, positions: NDArray[np.uint64], *, window: int = 2**17) -> NDArray[np.uint64]:
        """The numbers at ascending positions; reads at most `window` numbers at once."""
        numbers = np.empty(len(positions), np.uint64)
        done = 0
        while done < len(positions):
            start = int(positions[done])
            end = int(np.searchsorted(positions, np.uint64(start + window), "left"))
            chosen = positions[done:end] - np.uint64(start)
            numbers[done:end] = self.read(start, int(chosen[-1]) + 1)[chosen]
            done = end
        return numbers

    def close(self) -> None:
        """Forgets the numbers and removes the file."""
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> NumberFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
