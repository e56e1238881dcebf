"""Files that settings name, of which those of datasets on the hub are downloaded."""

from __future__ import annotations

from collections.abc import Iterable

from sheepop.core.console import Console
from sheepop.data.download.catalog import HUB


def local_files(paths: Iterable[str], columns: str, console: Console) -> list[str]:
    """The `paths`, with datasets on the hub replaced by the files of their ``train`` split, or of the one they name.

    These are downloaded first, below ``data``. Raises what `dataset_files` raises; the setting `columns` names columns.
    """
    found: list[str] = []
    for path in paths:
        if path.startswith(HUB):
            from sheepop.data.download.download import dataset_files  # which loads the hub's client

            found += map(str, dataset_files(path, console=console, columns=columns))
        else:
            found.append(path)
    return found
