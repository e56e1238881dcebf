"""Files that are whole or absent: temporary name beside the target, flush, fsync, checksum, rename last.

A directory written here carries ``checksums.json`` (SHA-256 of every file); a reader verifies it and names the
damaged file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError, SheepOpError, StorageError

CHECKSUMS = "checksums.json"
TEMPORARY_MARK = ".partial-"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a refused write (full disk, read-only, no permission) into a `StorageError` that names the place."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full. Free some space and run the command again",
            errno.EDQUOT: "the disk quota is used up. Free some space and run the command again",
            errno.EROFS: "the file system is read-only. Choose another place",
            errno.EACCES: "permission is denied. Choose another place or change its permissions",
            errno.EPERM: "the operation is not permitted. Choose another place",
            errno.ENOTDIR: "part of the path is a file, not a directory. Choose another place",
        }
        reason = reasons.get(error.errno or 0)
        if reason is None:
            raise
        raise StorageError(f"Cannot write {path}: {reason}.") from error
    except Exception as error:
        # safetensors wraps the operating system's error in its own type and keeps only the text.
        if "No space left on device" in str(error) and not isinstance(error, SheepOpError):
            raise StorageError(
                f"Cannot write {path}: the disk is full. Free some space and run the command again."
            ) from error
        raise


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replaces `path` by `content` so that a reader, or a crash, sees the old file or the new one."""
    path = Path(path)
    temporary = _temporary_beside(path)
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path, error_class: type[SheepOpError] = CheckpointError) -> Any:
    """Reads a JSON file; raises `error_class` naming the file when it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error_class(f"{path} is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise error_class(f"{path} is damaged: it is not valid JSON ({error}).") from None
    except OSError as error:
        raise error_class(f"{path} cannot be read: {error.strerror}.") from None


@contextmanager
def atomic_directory(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary directory that becomes `target`, checksummed and fsynced, when the block succeeds.

    When the block raises, the temporary directory is removed and `target` is as it was. With `replace` an
    existing target is moved aside before and removed after the rename.
    """
    target = Path(target)
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_beside(target)
        temporary.mkdir()
        try:
            yield temporary
            write_checksums(temporary)
            sync_tree(temporary)
            aside: Path | None = None
            if replace and target.exists():
                aside = _temporary_beside(target)
                target.rename(aside)
            temporary.rename(target)
            sync_directory(target.parent)
            if aside is not None:
                remove_tree(aside)
        except BaseException:
            remove_tree(temporary)
            raise


def remove_tree(path: Path) -> None:
    """Removes a file or directory tree; one that is already gone is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_partial(directory: Path) -> None:
    """Removes what a killed writer left beside its targets in `directory`."""
    for entry in directory.glob(f"*{TEMPORARY_MARK}*"):
        remove_tree(entry)


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path) -> None:
    """Writes ``checksums.json``: the SHA-256 of every other file below `directory`."""
    sums = {name: sha256_file(directory / name) for name in _files_below(directory)}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def damaged_files(directory: str | Path) -> list[str]:
    """One line per file below `directory` that is missing or differs from its recorded checksum; empty when whole."""
    directory = Path(directory)
    record = directory / CHECKSUMS
    if not record.is_file():
        return [f"{record} is missing: the directory was never finished"]
    try:
        sums = json.loads(record.read_text(encoding="utf-8"))
        expected = {str(name): str(value) for name, value in sums.items()}
    except (ValueError, AttributeError):
        return [f"{record} is damaged: it is not a table of checksums"]
    problems = []
    for name, value in sorted(expected.items()):
        file = directory / name
        if not file.is_file():
            problems.append(f"{file} is missing")
        elif sha256_file(file) != value:
            problems.append(f"{file} is damaged: its checksum differs from the recorded one")
    return problems


def sync_tree(directory: Path) -> None:
    """Flushes every file and directory below `directory` to the disk."""
    for name in _files_below(directory):
        _sync(directory / name)
    for child in directory.rglob("*"):
        if child.is_dir():
            sync_directory(child)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Makes renames inside `directory` durable."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files_below(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return sorted(path.relative_to(directory).as_posix() for path in files)


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:12]}")
