"""Which file every document of a split comes from, as a number and a table of names.

``tokens/train.src`` holds one number per document (int32, little endian) and ``tokens/train.sources.json`` the names.
Files are numbered in the order in which they first occur. Corpora of format 2 and before have no such files; there the
same is read from the documents themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, sha256_file, write_json

_NUMBER = np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class DocumentSources:
    """The file of document i is ``names[numbers[i]]``."""

    names: list[str]
    numbers: NDArray[np.int32]

    @classmethod
    def of_names(cls, sources: Iterable[str]) -> DocumentSources:
        """Those of documents whose files have these names."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(source, len(known)) for source in sources]
        return cls(list(known), np.array(numbers, dtype=_NUMBER))

    @classmethod
    def joined(cls, parts: Iterable[DocumentSources]) -> DocumentSources:
        """Those of the documents of several parts, one after the other."""
        known: dict[str, int] = {}
        numbers = [np.zeros(0, _NUMBER)]
        for part in parts:
            renamed = [known.setdefault(name, len(known)) for name in part.names]
            numbers.append(np.array(renamed, dtype=_NUMBER)[part.numbers])
        return cls(list(known), np.concatenate(numbers))

    def write(self, directory: Path, prefix: str) -> dict[str, Any]:
        """Writes the two files; returns their entry in the manifest."""
        numbers, names = directory / f"{prefix}.src", directory / f"{prefix}.sources.json"
        numbers.write_bytes(self.numbers.astype(_NUMBER).tobytes())
        write_json(names, self.names)
        return {
            "file": numbers.name,
            "sha256": sha256_file(numbers),
            "names": {"file": names.name, "sha256": sha256_file(names)},
        }

    @classmethod
    def read(cls, directory: Path, entry: Mapping[str, Any], num_documents: int) -> DocumentSources:
        """Reads what `write` left; raises `DataError` naming a file that is missing or damaged."""
        path = directory / Path(entry["file"]).name
        names = read_json(directory / Path(entry["names"]["file"]).name, DataError)
        try:
            numbers = np.fromfile(path, _NUMBER)
            is_whole = path.stat().st_size == num_documents * _NUMBER.itemsize and isinstance(names, list)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Build the corpus again.") from None
        if not is_whole or (numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names)):
            raise DataError(f"{path} is damaged: it does not name a file for each document. Build the corpus again.")
        return cls([str(name) for name in names], numbers)
