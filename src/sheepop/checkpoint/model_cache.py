"""The cache of models in other formats: published models, and files of other programs that were given as MODEL.

It is ``~/.cache/sheepop/models``, or the directory that ``SHEEPOP_MODELS`` names. An entry is a folder with a key that
changes with the source. It holds ``model/`` (a model directory, or an adapter as it is published), ``record.json`` (its
origin, written last; its time is that of the last use) and the files that were fetched, ``source/``. The weights of
another program's model stay where they are (see `linked_weights`). A process that fills an entry holds its lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sheepop.checkpoint.linked_weights import LinkedWeights
from sheepop.checkpoint.model_kind import ADAPTER_CONFIG, PublishedName, gguf_parts
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, StorageError
from sheepop.core.files import (
    cache_directory,
    read_json,
    remove_tree,
    require_writable,
    storage_errors,
    write_json,
)
from sheepop.core.interrupts import interrupts_advise
from sheepop.core.locks import exclusive_lock, is_locked

MARGIN = 2**24
"""Bytes to leave free on the disk."""
# Raised when an import changes, so that models are imported again.
_VERSION = 4
_RECORD, _MODEL, _SOURCE, _LOCK = "record.json", "model", "source", ".lock"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_LABEL = 80


@dataclass(frozen=True)
class CachedModel:
    """An entry of the cache at `path`, finished or not."""

    path: Path

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """The content of ``record.json``; empty for an entry that is not finished."""
        try:
            found = read_json(self.path / _RECORD)
        except CheckpointError:
            return {}
        is_whole = isinstance(found, dict) and isinstance(found.get("name"), str) and found.get("version") == _VERSION
        is_there = any((self.directory / name).is_file() for name in (CONFIG, ADAPTER_CONFIG))
        return found if is_whole and is_there and self._has_linked() else {}

    def _has_linked(self) -> bool:
        """Whether weights that lie elsewhere are still there."""
        try:
            LinkedWeights.read(self.directory)
        except CheckpointError:
            return False
        return True

    @property
    def is_finished(self) -> bool:
        """Whether the model can be used."""
        return bool(self.record)

    @property
    def name(self) -> str:
        """The name or path that the model was asked for by; of an unfinished entry, the name of its folder."""
        return str(self.record.get("name", self.path.name))

    @property
    def has_weights(self) -> bool:
        """Whether it is a whole model; otherwise only its tokenizer and its configuration were fetched."""
        return not self.record.get("tokenizer", False)

    @property
    def revision(self) -> str | None:
        """The commit of a published model; None for a model from a path."""
        revision = self.record.get("revision")
        return None if revision is None else str(revision)

    @property
    def directory(self) -> Path:
        """The model directory."""
        return self.path / _MODEL

    @property
    def source(self) -> Path:
        """The folder with the files that were fetched."""
        return self.path / _SOURCE

    @property
    def num_bytes(self) -> int:
        """The bytes that the entry takes on the disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    @property
    def last_used(self) -> float | None:
        """When the model was last used, in seconds since 1970; None for an unfinished entry."""
        return (self.path / _RECORD).stat().st_mtime if self.is_finished else None

    def answers(self, name: PublishedName) -> bool:
        """Whether this is the model that `name` means, as of when the name was last pulled."""
        if name.key in self.record.get("names", ()):
            return True
        same = str(self.record.get("repository", "")).lower() == name.repository.lower()
        commit = same and name.commit is not None and (self.revision or "").startswith(name.commit)
        return bool(commit) and self.record.get("file") == name.file

    def use(self) -> Path:
        """Notes that the model is used now, where the cache can be written; returns its directory."""
        with suppress(OSError):
            os.utime(self.path / _RECORD)
        return self.directory

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Writes the record, which finishes the entry."""
        write_json(self.path / _RECORD, {"version": _VERSION, **record})
        self.__dict__.pop("record", None)

    def remove(self) -> None:
        """Removes the entry; raises `CheckpointError` if a process is filling it."""
        if is_locked(self.path / _LOCK):
            raise CheckpointError(f"Another process is fetching {self.name} right now. Stop it, or wait for it.")
        with storage_errors(self.path):
            (self.path / _RECORD).unlink(missing_ok=True)  # first, so that a killed removal leaves no broken model
            remove_tree(self.path)


def models_directory() -> Path:
    """Returns the directory of the cache, which need not exist."""
    named = os.environ.get("SHEEPOP_MODELS")
    try:
        return Path(named) if named else cache_directory() / "models"
    except RuntimeError:
        raise StorageError(
            "This user has no home directory for a cache of models. Set SHEEPOP_MODELS to a directory."
        ) from None


def cached_models() -> list[CachedModel]:
    """Returns all entries of the cache, sorted by their folders."""
    place = models_directory()
    return [CachedModel(path) for path in sorted(place.iterdir()) if path.is_dir()] if place.is_dir() else []


def find_published(name: PublishedName, *, weights: bool = True) -> CachedModel | None:
    """Returns the entry of a published model, or None if it has not been fetched.

    Without `weights`, one that has only the tokenizer will do, too.
    """
    found = [entry for entry in cached_models() if entry.answers(name) and (entry.has_weights or not weights)]
    return max(found, key=lambda entry: entry.has_weights, default=None)


def entry_for(label: str, *identity: Any) -> CachedModel:
    """Returns the entry of a source; `identity` is JSON that differs for any other source."""
    digest = hashlib.sha256(json.dumps([_VERSION, label, *identity]).encode()).hexdigest()
    return CachedModel(models_directory() / f"{_UNSAFE.sub('--', label)[:_LONGEST_LABEL]}-{digest[:16]}")


@contextmanager
def filling(entry: CachedModel, name: str, console: Console) -> Iterator[None]:
    """Holds the lock of an entry; first waits for another process that fills it.

    An entry that is left empty is removed. Raises `StorageError` if the cache cannot be written.
    """
    try:
        require_writable(models_directory())
    except StorageError as error:
        raise StorageError(
            f"{error} It is the cache of models; SHEEPOP_MODELS can name another directory for it."
        ) from error
    if is_locked(entry.path / _LOCK):
        console.info(f"Waiting for another process that fetches {name}.")
    advice = "What was fetched is kept; run the same command again to go on."
    with storage_errors(entry.path), exclusive_lock(entry.path / _LOCK, None), interrupts_advise(advice):
        entry.__dict__.pop("record", None)
        try:
            yield
        finally:
            if [file.name for file in entry.path.iterdir()] == [_LOCK]:
                remove_tree(entry.path)


def local_model(path: Path, console: Console) -> Path:
    """Returns the model directory for a directory in Hugging Face's format or a GGUF file, made if it is not yet there.

    For a source whose files have other sizes or times it is made again, and the former one is removed.
    """
    place = path.resolve()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.is_file())
    else:
        files = [file for file in map(place.with_name, gguf_parts(place.name)) if file.is_file()]
    stamps = [(file.name, file.stat().st_size, file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    entry = entry_for(place.stem, os.fsencode(place).hex(), stamps)
    if entry.is_finished:
        return entry.use()
    with filling(entry, str(path), console):
        if not entry.is_finished:
            stored = open_source(entry, place, {}, console)
            entry.write_record({"name": os.fsencode(place).decode(errors="replace"), "stored": stored})
    for other in cached_models():
        if other.revision is None and other.name == entry.name and other.path != entry.path:
            other.remove()
    return entry.use()


def open_source(entry: CachedModel, source: Path, origin: Mapping[str, Any], console: Console) -> list[str]:
    """Makes the model directory of an entry for the model in `source`, whose weights stay there.

    Returns the formats in which they are stored.
    """
    # Loads torch, which finding a model that is in the cache does not need.
    from sheepop.checkpoint.foreign import open_in_place

    return open_in_place(source, entry.directory, origin, console)


def require_space(num_bytes: int, name: str) -> None:
    """Raises `StorageError` if the disk of the cache has not `num_bytes` free."""
    place = models_directory()
    free = shutil.disk_usage(place).free
    if num_bytes + MARGIN > free:
        raise StorageError(
            f"{name} needs {num_bytes / 1e6:,.0f} MB in {place}, where {free / 1e6:,.0f} MB are free. Free some space "
            "(sheepop models lists what is there), or set SHEEPOP_MODELS to a directory on another disk."
        )
