"""Weights that a model directory of the cache does not copy: they stay in the files of another program.

Such a directory has ``weights.json`` instead of weights. It names the directory or the GGUF file that has them, and
each file there with its size, inode and time of change, by which another file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sheepop.checkpoint.model_kind import gguf_parts
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json, write_json

LINK = "weights.json"
_VERSION = 1
_SAFETENSORS = ".safetensors"

Stamp = tuple[str, int, int, int]
"""The name of a file, its size, inode, and time of change in nanoseconds."""


@dataclass(frozen=True)
class LinkedWeights:
    """The files of the model at `source`, a directory in Hugging Face's format or a GGUF file.

    A `source` that is not absolute lies in the cache, beside the model directory. Only the
    sizes of its files are noted, because they may be copied to another cache.
    """

    directory: Path
    source: Path
    stamps: tuple[Stamp, ...]

    @classmethod
    def of(cls, directory: Path, source: Path) -> LinkedWeights:
        """Notes the state of the files of the model at `source` for `directory`."""
        files = [source.with_name(name) for name in gguf_parts(source.name)]
        if source.is_dir():
            files = [source / CONFIG, *sorted(source.glob(f"*{_SAFETENSORS}"))]
        entry = directory.parent
        place = source.relative_to(entry) if source.is_relative_to(entry) else source.resolve()
        return cls(directory, place, tuple(_stamp(file, is_own=not place.is_absolute()) for file in files))

    @property
    def place(self) -> Path:
        """The path of the model."""
        return self.directory.parent / self.source

    @classmethod
    def read(cls, directory: Path) -> LinkedWeights | None:
        """The link of a model directory, or None if it has its own weights.

        Raises `CheckpointError` if it is damaged, or if a file is missing or another one.
        """
        if not (directory / LINK).is_file():
            return None
        found = read_json(directory / LINK)
        try:
            is_known = found["version"] == _VERSION
            source = Path(os.fsdecode(bytes.fromhex(found["source"])))
            stamps = tuple((str(name), int(size), int(node), int(time)) for name, size, node, time in found["files"])
            link = cls(directory, source, stamps)
        except (KeyError, TypeError, ValueError):
            is_known = False
        if not is_known:
            raise CheckpointError(f"{directory / LINK} is damaged. Remove {directory.parent}, and try again.")
        link.require_unchanged()
        return link

    def write(self, directory: Path) -> None:
        """Writes the link into a model directory."""
        source = os.fsencode(self.source).hex()  # any name of a file, in JSON
        write_json(directory / LINK, {"version": _VERSION, "source": source, "files": self.stamps})

    def require_unchanged(self) -> None:
        """Raises `CheckpointError` if a file is missing, or is another one than when the model was opened first."""
        for stamp in self.stamps:
            path = self._path(stamp)
            if not path.is_file():
                raise CheckpointError(f"{path}, which has weights of the model, is missing. Put it back.")
            if _stamp(path, is_own=not self.source.is_absolute()) != stamp:
                raise CheckpointError(f"{path} was changed since the model was opened. Give {self.place} again.")

    def identity(self) -> str:
        """Returns a hash of the files with the weights, whatever their names and places are."""
        return _hash(sorted(self._sums().values()))

    def former_identity(self) -> str:
        """Returns what was recorded before, a hash in which the names of the files count."""
        return _hash(self._sums())

    def _sums(self) -> dict[str, str]:
        from sheepop.core.verified_files import remembered_sha256  # loads pydantic

        paths = [self._path(stamp) for stamp in self.stamps if stamp[0] != CONFIG]
        return {path.name: remembered_sha256(path) for path in paths}

    def _path(self, stamp: Stamp) -> Path:
        return (self.place if self.place.is_dir() else self.place.parent) / stamp[0]


def _stamp(path: Path, *, is_own: bool) -> Stamp:
    status = path.stat()
    return (path.name, status.st_size, *((0, 0) if is_own else (status.st_ino, status.st_mtime_ns)))


def _hash(sums: object) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
