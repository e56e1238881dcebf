"""Whole files from the hub to the disk: what has come stays and is gone on with, and nothing counts unverified."""

from __future__ import annotations

import hashlib
import os
from io import FileIO
from pathlib import Path

from sheepop.core.console import Progress
from sheepop.core.errors import DataError
from sheepop.core.files import storage_errors, sync_directory
from sheepop.data.download.hub import Contents, Hub, HubFile
from sheepop.data.download.network import BrokenOff, Patience

# Progress of this many bytes gives a transfer all its attempts again.
_PROGRESS_BYTES = 2**20
_READ_BYTES = 2**20
PART_SUFFIX = ".part"


def transfer(hub: Hub, contents: Contents, file: HubFile, target: Path, progress: Progress) -> None:
    """Makes `target` the file of the repository, going on with what an earlier transfer left beside it.

    `progress` is advanced by megabytes. Raises `DataError` when the hub cannot be reached or what comes is twice not
    the file that it lists, and `StorageError` when it cannot be written.
    """
    if target.is_file() and target.stat().st_size == file.size:
        progress.advance(file.size / 1e6)
        return
    part = target.with_name(target.name + PART_SUFFIX)
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in (1, 2):
            _receive(hub, contents, file, part, progress)
            problem = damage(part, file)
            if problem is None:
                break
            part.unlink()
            progress.advance(-file.size / 1e6)
            if attempt == 2:
                raise DataError(
                    f"What {hub.name} sends for {file.path} of {contents.repository} is not the file that it lists: "
                    f"{problem}. This happened twice. Run the command again later, or ask the owner."
                )
        part.rename(target)
        sync_directory(target.parent)


def damage(path: Path, file: HubFile) -> str | None:
    """How the bytes at `path` differ from `file`; None when size and hash are right."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    if file.sha256 is not None:
        expected, found = file.sha256, _digest(path, "sha256")
    elif file.git_sha1 is not None:
        expected, found = file.git_sha1, _digest(path, "sha1", b"blob %d\0" % size)
    else:
        return None
    return None if found == expected else f"its hash is {found} instead of {expected}"


def _digest(path: Path, algorithm: str, beginning: bytes = b"") -> str:
    digest = hashlib.new(algorithm, beginning, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _receive(hub: Hub, contents: Contents, file: HubFile, part: Path, progress: Progress) -> None:
    """Appends to `part` until it is as long as the file."""
    patience = Patience(progress.describe)
    with part.open("ab", buffering=0) as output, hub.explained(contents.repository):
        if output.tell() > file.size:
            output.truncate(0)
            output.seek(0)
        progress.advance(output.tell() / 1e6)
        renewed_at = output.tell()
        while output.tell() < file.size:
            try:
                _append(hub, contents, file, output, progress)
            except Exception as error:
                if output.tell() - renewed_at >= _PROGRESS_BYTES:
                    patience.renew()
                    renewed_at = output.tell()
                patience.wait(error)
        os.fsync(output.fileno())


def _append(hub: Hub, contents: Contents, file: HubFile, output: FileIO, progress: Progress) -> None:
    """One request for the rest of the file; raises `BrokenOff` when the answer ends before it."""
    with hub.stream(contents, file, output.tell()) as (offset, chunks):
        if offset != output.tell():
            progress.advance((offset - output.tell()) / 1e6)
            output.truncate(offset)
            output.seek(offset)
        for chunk in chunks:
            if output.tell() + len(chunk) > file.size:
                raise DataError(
                    f"{hub.name} sends more than the {file.size:,} bytes that it lists for {file.path}. Run the "
                    "command again later."
                )
            _write(output, chunk)
            progress.advance(len(chunk) / 1e6)
    if output.tell() < file.size:
        raise BrokenOff(f"{file.path} ended after {output.tell():,} of {file.size:,} bytes")


def _write(output: FileIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[output.write(view) :]
