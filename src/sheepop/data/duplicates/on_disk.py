"""Arrays in files, and external sorting, for more numbers than fit in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.files import remove_tree, storage_errors

Rows = NDArray[np.uint64]
_WORD = np.dtype("<u8")
# The most runs to merge at once; with more, each would have too little memory, so they are merged in stages.
_FAN_IN = 64
_LEAST_ROWS = 16
_BLOCK_ROWS = 2**16


class ExternalSort(AbstractContextManager["ExternalSort"]):
    """Sorts rows of `columns` 64-bit numbers lexicographically; with `unique`, drops equal rows.

    Uses about `memory_bytes` of memory and, for more rows, files below `directory`, which it removes at the end. Add
    all rows first, then read `blocks` as often as needed.
    """

    def __init__(self, directory: Path, columns: int, *, memory_bytes: int, unique: bool = False) -> None:
        self._directory, self._columns, self._unique = directory, columns, unique
        # Sorting needs memory for the unsorted and the sorted rows, their order, and the tied rows.
        self._run_rows = max(_LEAST_ROWS, memory_bytes // (4 * columns * _WORD.itemsize))
        self._waiting: Rows = np.empty((0, columns), np.uint64)
        self._num_waiting = 0
        self._runs: list[Path] = []
        self._num_files = 0

    def add(self, rows: Rows) -> None:
        """Adds rows, ``(N, columns)``."""
        while len(rows):
            room = self._run_rows - self._num_waiting
            taken, rows = rows[:room], rows[room:]
            end = self._num_waiting + len(taken)
            # A growing array: many small ones would take a tenth of the time.
            if end > len(self._waiting):
                larger = np.empty((min(self._run_rows, max(2 * end, _LEAST_ROWS)), self._columns), np.uint64)
                larger[: self._num_waiting] = self._waiting[: self._num_waiting]
                self._waiting = larger
            self._waiting[self._num_waiting : end] = taken
            self._num_waiting = end
            if end == self._run_rows:
                self._write_run(iter([self._take_waiting()]))
                # Merging drops repeated rows before they fill the disk.
                if self._unique and len(self._runs) > _FAN_IN:
                    self._merge_some()

    def blocks(self) -> Iterator[Rows]:
        """Yields all rows in order, in arrays of at most 65,536 rows."""
        waiting = self._take_waiting()
        if self._runs and len(waiting):
            self._write_run(iter([waiting]))
        elif not self._runs:
            # Keep the sorted rows, so that they can be read again.
            self._waiting, self._num_waiting = waiting, len(waiting)
        while len(self._runs) > _FAN_IN:
            self._merge_some()
        for rows in self._merge(self._runs) if self._runs else [waiting]:
            for start in range(0, len(rows), _BLOCK_ROWS):
                yield rows[start : start + _BLOCK_ROWS]

    def __exit__(self, *exception: object) -> None:
        self._waiting, self._num_waiting, self._runs = self._waiting[:0].copy(), 0, []
        remove_tree(self._directory)

    def _take_waiting(self) -> Rows:
        rows = self._sorted(self._waiting[: self._num_waiting])
        self._waiting, self._num_waiting = self._waiting[:0].copy(), 0
        return rows

    def _sorted(self, rows: Rows) -> Rows:
        rows = sorted_rows(rows)
        return rows[are_new(rows)] if self._unique else rows

    def _write_run(self, blocks: Iterator[Rows]) -> None:
        path = self._directory / f"{self._num_files:06d}.run"
        self._num_files += 1
        with storage_errors(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for block in blocks:
                    file.write(np.ascontiguousarray(block, dtype=_WORD).data)
        self._runs.append(path)

    def _merge_some(self) -> None:
        """Merges the oldest runs into one."""
        merged, self._runs = self._runs[:_FAN_IN], self._runs[_FAN_IN:]
        self._write_run(self._merge(merged))
        for path in merged:
            path.unlink()

    def _merge(self, paths: list[Path]) -> Iterator[Rows]:
        """Yields merged blocks: from all runs, the rows up to the smallest last row in memory.

        No unread row can come before these, or, if the rows of each run are unique, be equal to one.
        """
        block_rows = max(_LEAST_ROWS, self._run_rows // len(paths))
        runs = [np.asarray(np.memmap(path, _WORD, "r")).reshape(-1, self._columns) for path in paths]
        while runs:
            blocks = [run[:block_rows] for run in runs]
            bound = min(tuple(block[-1].tolist()) for block in blocks)
            taken = [_num_to(block, bound) for block in blocks]
            yield self._sorted(np.concatenate([block[:end] for block, end in zip(blocks, taken, strict=True)]))
            runs = [run[end:] for run, end in zip(runs, taken, strict=True) if end < len(run)]


def array_on_disk(path: Path, size: int, dtype: type[np.generic] = np.uint64) -> NDArray[Any]:
    """A memory-mapped array of zeros in a new file, allocated now, as a full disk later would look like a crash."""
    num_bytes = max(1, size) * np.dtype(dtype).itemsize
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    return np.asarray(np.memmap(path, dtype, "r+"))[:size]


def sorted_rows(rows: Rows) -> Rows:
    """The rows in lexicographic order; sorts by the first column and compares the others only in ties."""
    rows = rows[np.argsort(rows[:, 0])]
    first = rows[:, 0]
    repeats = first[1:] == first[:-1]
    tied = np.zeros(len(rows), dtype=bool)
    tied[1:] |= repeats
    tied[:-1] |= repeats
    if tied.any() and rows.shape[1] > 1:
        # Rows with equal first columns are adjacent, so sorting all tied rows together keeps each group in place.
        among = rows[tied]
        rows[tied] = among[np.lexsort(among.T[::-1])]
    return rows


def are_new(rows: Rows) -> NDArray[np.bool_]:
    """Which rows differ from the row before."""
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return new


def _num_to(rows: Rows, bound: tuple[int, ...]) -> int:
    """The number of sorted rows that are not greater than `bound`."""
    start, end = 0, len(rows)
    for column, value in enumerate(bound):
        numbers = rows[start:end, column]
        left, right = (int(np.searchsorted(numbers, np.uint64(value), side)) for side in ("left", "right"))
        start, end = start + left, start + right
    return end
