"""Exact duplicates: by content ids, one at a time or over all documents, in bounded memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sheepop.core.errors import StorageError
from sheepop.data.duplicates.on_disk import ExternalSort, Rows
from sheepop.data.duplicates.signature_files import ID, PartSignatures

_IN_MEMORY = 2**20
_CACHE_KIB = 2**18


class SeenContent:
    """A set of content ids: the first `in_memory` of them in a Python set, the others with SQLite in a file at `path`.

    Memory is bounded by about 100 bytes for each id of the first kind and 256 MiB for all others.
    """

    def __init__(self, path: Path, *, in_memory: int = _IN_MEMORY) -> None:
        self._path, self._in_memory = path, in_memory
        self._first: set[bytes] = set()
        self._others: sqlite3.Connection | None = None

    def add(self, content_id: str) -> bool:
        """Whether the id (hexadecimal) is new; it is in the set afterwards."""
        key = bytes.fromhex(content_id)
        if key in self._first:
            return False
        if len(self._first) < self._in_memory:
            self._first.add(key)
            return True
        try:
            self._others = self._others or self._open()
            return self._others.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"Cannot write {self._path}: {error}. Free some space and run the command again."
            ) from None

    def close(self) -> None:
        """Forgets everything and removes the file."""
        if self._others is not None:
            self._others.close()
            self._path.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        # Nothing here outlives the build, so the journal and the waits for the disk are switched off.
        for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size=-{_CACHE_KIB}"):
            database.execute(f"PRAGMA {setting}")
        database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")
        database.execute("BEGIN")
        return database

    def __enter__(self) -> SeenContent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def later_copies(parts: Sequence[PartSignatures], directory: Path, *, memory_bytes: int) -> ExternalSort:
    """Every document whose text stands earlier: rows of its ordinal and that of the first with this text, ascending.

    An ordinal is the place of a document among those of all parts. Close what is returned.
    """
    copies = ExternalSort(directory / "copies", 2, memory_bytes=memory_bytes)
    with ExternalSort(directory / "ids", 3, memory_bytes=memory_bytes) as by_id:
        start = 0
        for part in parts:
            for ids in part.blocks(ID.start, ID.stop):
                ordinals = np.arange(start, start + ids.shape[1], dtype=np.uint64)
                by_id.add(np.column_stack([ids.T, ordinals]))
                start += ids.shape[1]
        for rows in _copies_of_firsts(by_id.blocks()):
            copies.add(rows)
    return copies


def _copies_of_firsts(blocks: Iterator[Rows]) -> Iterator[Rows]:
    """From rows (id, id, ordinal) in order, rows (ordinal, ordinal of the first row with the same id)."""
    before: Rows = np.empty((0, 3), np.uint64)
    for block in blocks:
        # The first row of an id that goes on in the next block is carried over.
        rows = np.concatenate([before, block])
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
        firsts = rows[new][np.cumsum(new) - 1, 2]
        yield np.column_stack([rows[~new, 2], firsts[~new]])
        before = rows[new][-1:]
