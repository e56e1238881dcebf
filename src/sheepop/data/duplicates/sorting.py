"""Sorting more numbers than memory holds: sorted runs on disk, merged block by block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sheepop.core.files import remove_tree, storage_errors

Rows = NDArray[np.uint64]
_WORD = np.dtype("<u8")
# More runs than this would leave each of them too little memory to read from; they are merged in stages instead.
_FAN_IN = 64
_LEAST_ROWS = 16
_BLOCK_ROWS = 2**16


class ExternalSort:
    """Rows of `columns` 64-bit numbers in lexicographic order; with `unique`, equal rows come once.

    Holds at most about `memory_bytes`; what is more stands in files below `directory`, which is made on need and
    removed by `close`. Add everything, then read `blocks` as often as needed.
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
            if end > len(self._waiting):
                self._waiting = _enlarged(self._waiting, min(self._run_rows, max(2 * end, _LEAST_ROWS)))
            self._waiting[self._num_waiting : end] = taken
            self._num_waiting = end
            if end == self._run_rows:
                self._write_run(iter([self._take_waiting()]))
                # Rows that come again and again are dropped before they fill the disk.
                if self._unique and len(self._runs) > _FAN_IN:
                    self._merge_some()

    def blocks(self) -> Iterator[Rows]:
        """All rows in order, in arrays of at most 65,536 rows."""
        for rows in self._sorted_blocks():
            for start in range(0, len(rows), _BLOCK_ROWS):
                yield rows[start : start + _BLOCK_ROWS]

    def close(self) -> None:
        """Forgets everything and removes the files."""
        self._waiting, self._num_waiting, self._runs = self._waiting[:0].copy(), 0, []
        remove_tree(self._directory)

    def __enter__(self) -> ExternalSort:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sorted_blocks(self) -> Iterator[Rows]:
        waiting = self._take_waiting()
        if not self._runs:
            # Kept sorted, so that it can be read again.
            self._waiting, self._num_waiting = waiting, len(waiting)
            yield waiting
            return
        if len(waiting):
            self._write_run(iter([waiting]))
        while len(self._runs) > _FAN_IN:
            self._merge_some()
        yield from self._merge(self._runs)

    def _take_waiting(self) -> Rows:
        rows = self._sorted(self._waiting[: self._num_waiting])
        self._waiting, self._num_waiting = self._waiting[:0].copy(), 0
        return rows

    def _sorted(self, rows: Rows) -> Rows:
        rows = sorted_rows(rows)
        return _without_repeats(rows) if self._unique else rows

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
        runs = [_Run(path, self._columns, block_rows) for path in paths]
        while runs := [run for run in runs if run.fill()]:
            bound = min(tuple(run.rows[-1].tolist()) for run in runs)
            yield self._sorted(np.concatenate([run.take_to(bound) for run in runs]))


class _Run:
    """A sorted file, of which `rows` is the part in memory."""

    def __init__(self, path: Path, columns: int, block_rows: int) -> None:
        self._path, self._columns, self._block_rows = path, columns, block_rows
        self._offset = 0
        self.rows: Rows = np.empty((0, columns), np.uint64)

    def fill(self) -> bool:
        """Reads on until memory holds a block again, or all that is left; whether there is a row now."""
        # All runs are filled up each time: where every one of them reaches as far, most of what is read can be taken.
        missing = self._block_rows - len(self.rows)
        numbers = read_numbers(self._path, self._offset, missing * self._columns)
        if numbers.size:
            self.rows = np.concatenate([self.rows, numbers.reshape(-1, self._columns)])
            self._offset += numbers.size
        return len(self.rows) > 0

    def take_to(self, bound: tuple[int, ...]) -> Rows:
        """Removes and returns the rows that are not greater than `bound`."""
        start, end = 0, len(self.rows)
        for column, value in enumerate(bound):
            numbers = self.rows[start:end, column]
            left, right = (int(np.searchsorted(numbers, np.uint64(value), side)) for side in ("left", "right"))
            start, end = start + left, start + right
        taken, self.rows = self.rows[:end], self.rows[end:]
        return taken


class Cursor:
    """Reads sorted blocks piece by piece, as far as asked."""

    def __init__(self, blocks: Iterator[Rows], columns: int) -> None:
        self._blocks = blocks
        self._rest: Rows = np.empty((0, columns), np.uint64)

    def take_below(self, bound: int) -> Iterator[Rows]:
        """The rows not read yet whose first column is less than `bound`; read them all before asking again."""
        while True:
            end = int(np.searchsorted(self._rest[:, 0], np.uint64(bound), "left"))
            taken, self._rest = self._rest[:end], self._rest[end:]
            if len(taken):
                yield taken
            if len(self._rest):
                return
            following = next(self._blocks, None)
            if following is None:
                return
            self._rest = following


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


def _enlarged(rows: Rows, size: int) -> Rows:
    larger = np.empty((size, rows.shape[1]), np.uint64)
    larger[: len(rows)] = rows
    return larger


def _without_repeats(rows: Rows) -> Rows:
    if len(rows) < 2:
        return rows
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return rows[new]


def read_numbers(path: Path, start: int, count: int) -> NDArray[np.uint64]:
    """At most `count` 64-bit numbers of a file, from number `start` on."""
    return np.fromfile(path, _WORD, count, offset=start * _WORD.itemsize).astype(np.uint64, copy=False)
