"""More numbers than memory holds: arrays in files, and sorting by runs on disk that are merged block by block."""

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
# More runs than this would leave each of them too little memory to read from; they are merged in stages instead.
_FAN_IN = 64
_LEAST_ROWS = 16
_BLOCK_ROWS = 2**16


class ExternalSort(AbstractContextManager["ExternalSort"]):
    """Rows of `columns` 64-bit numbers in lexicographic order; with `unique`, equal rows come once.

    Holds at most about `memory_bytes`; what is more stands in files below `directory`, which is made on need and
    removed at the end. Add everything, then read `blocks` as often as needed.
    """

    def __init__(self, directory: Path, columns: int, *, memory_bytes: int, unique: bool = False) -> None:
        self._directory, self._columns, self._unique = directory, columns, unique
        row_bytes = columns * _WORD.itemsize
        # While rows are sorted, memory holds them as they came and sorted, their order, and those that are tied.
        self._run_rows = max(_LEAST_ROWS, memory_bytes // (4 * row_bytes))
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
            # One array that grows: many small ones would cost a tenth of the time.
            if end > len(self._waiting):
                larger = np.empty((min(self._run_rows, max(2 * end, _LEAST_ROWS)), self._columns), np.uint64)
                larger[: self._num_waiting] = self._waiting[: self._num_waiting]
                self._waiting = larger
            self._waiting[self._num_waiting : end] = taken
            self._num_waiting = end
            if end == self._run_rows:
                self._write_run(iter([self._take_waiting()]))
                # Rows that come again and again are dropped before they fill the disk.
                if self._unique and len(self._runs) > _FAN_IN:
                    self._merge_some()

    def blocks(self) -> Iterator[Rows]:
        """All rows in order, in arrays of at most 65,536 rows."""
        waiting = self._take_waiting()
        if self._runs and len(waiting):
            self._write_run(iter([waiting]))
        elif not self._runs:
            # Kept sorted, so that it can be read again.
            self._waiting, self._num_waiting = waiting, len(waiting)
        while len(self._runs) > _FAN_IN:
            self._merge_some()
        for rows in self._merge(self._runs) if self._runs else [waiting]:
            for start in range(0, len(rows), _BLOCK_ROWS):
                yield rows[start : start + _BLOCK_ROWS]

    def __exit__(self, *exception: object) -> None:
        """Forgets everything and removes the files."""
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
        """Makes one run of the oldest ones."""
        merged, self._runs = self._runs[:_FAN_IN], self._runs[_FAN_IN:]
        self._write_run(self._merge(merged))
        for path in merged:
            path.unlink()

    def _merge(self, paths: list[Path]) -> Iterator[Rows]:
        """Takes from all runs what is not beyond the smallest last row in memory: nothing unread can come before.

        Nor can it be equal when rows come once in each run.
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
    """An array of `size` zeros in a new file at `path`, of which the system keeps in memory what is used.

    Its place on the disk is taken at once: a disk that fills up later cannot be told from a crash.
    """
    num_bytes = max(1, size) * np.dtype(dtype).itemsize
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    return np.asarray(np.memmap(path, dtype, "r+"))[:size]


def sorted_rows(rows: Rows) -> Rows:
    """The rows in lexicographic order. Rows that differ in the first column are told apart fast."""
    rows = rows[np.argsort(rows[:, 0])]
    first = rows[:, 0]
    repeats = first[1:] == first[:-1]
    tied = np.zeros(len(rows), dtype=bool)
    tied[1:] |= repeats
    tied[:-1] |= repeats
    if tied.any() and rows.shape[1] > 1:
        # Rows with equal first columns stand together already, so ordering all tied rows leaves them in their places.
        among = rows[tied]
        rows[tied] = among[np.lexsort(among.T[::-1])]
    return rows


def are_new(rows: Rows) -> NDArray[np.bool_]:
    """Which rows differ from the one before them."""
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return new


def _num_to(rows: Rows, bound: tuple[int, ...]) -> int:
    """How many of the first rows, which are sorted, are not greater than `bound`."""
    start, end = 0, len(rows)
    for column, value in enumerate(bound):
        numbers = rows[start:end, column]
        left, right = (int(np.searchsorted(numbers, np.uint64(value), side)) for side in ("left", "right"))
        start, end = start + left, start + right
    return end
