"""What the paths of a configuration stand for: files, folders, git repositories at a revision, the rows of a query."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sheepop.data.config import DataConfig
from sheepop.data.discovery import FoundFile, Skipped, discover
from sheepop.data.extract.git import GIT_PREFIX, repository_entries
from sheepop.data.pipeline.inventory import Entry
from sheepop.data.pipeline.source import Query


def find_inputs(
    config: DataConfig, query: Query | None, leave_out: tuple[Path, ...] = ()
) -> Iterator[FoundFile | Skipped | Entry]:
    """Every input in a fixed order: the files below the plain paths, then repositories, then the query.

    The directories `leave_out` are not read even when they lie below an input. Raises `DataError` for a path that
    does not exist and for a repository or revision that git does not know.
    """
    plain = [path for path in config.paths if not path.startswith(GIT_PREFIX)]
    if plain:
        yield from discover(plain, max_file_bytes=config.max_file_bytes, ignore=config.ignore, leave_out=leave_out)
    for path in config.paths:
        if path.startswith(GIT_PREFIX):
            yield from repository_entries(path, max_file_bytes=config.max_file_bytes, ignore=config.ignore)
    if query is not None:
        from sheepop.data.extract.address import source_label

        yield Entry("query", "", f"{source_label(query.url)}: {query.text}", 0)
