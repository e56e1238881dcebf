"""Exact duplicates: a set of content ids that may outgrow memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sheepop.core.errors import StorageError

_CACHE_KIB = 2**18


class SeenContent:
    """A set of content ids held by SQLite: up to 256 MiB in memory, the rest in a temporary file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Nothing here outlives the build, so the journal and the waits for the disk are switched off.
        self._database = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size=-{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, content_id: str) -> bool:
        """Whether the id (hexadecimal) is new; it is in the set afterwards."""
        row = (bytes.fromhex(content_id),)
        try:
            return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", row).rowcount == 1
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"Cannot write {self._path}: {error}. Free some space and run the command again."
            ) from None

    def close(self) -> None:
        """Forgets everything and removes the file."""
        self._database.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> SeenContent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
