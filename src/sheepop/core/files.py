"""Atomic writes: a temporary file next to the target, flush, fsync, checksum, and a rename last.

A directory written here has ``checksums.json`` (SHA-256 of every file); a reader verifies it and names damaged files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError, OutputError, SheepOpError, StorageError

CHECKSUMS = "checksums.json"
TEMPORARY_MARK = ".partial-"
_ASIDE_MARK = ".replaced-"
_LEFT_BEHIND = re.compile(r"\.(?P<target>.+)(?P<mark>\.partial-|\.replaced-)[0-9a-z]+")

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust writes it

_SPACE_REASONS = {
    errno.ENOSPC: "the disk is full. Free some space and run the command again",
    errno.EDQUOT: "the disk quota is used up. Free some space and run the command again",
    errno.EFBIG: "the file would be larger than the file system or the process's limit allows. Choose another place",
}
_PLACE_REASONS = {
    errno.EROFS: "the file system is read-only. Choose another place",
    errno.EACCES: "permission is denied. Choose another place or change its permissions",
    errno.EPERM: "the operation is not permitted. Choose another place",
}
_NAME_REASONS = {
    errno.ENOTDIR: "part of the path is a file, not a directory. Choose another place",
    errno.EISDIR: "a directory with that name is in the way. Choose another name",
    errno.EEXIST: "something with that name already exists. Choose another name",
    errno.ENOTEMPTY: "a directory with that name already exists. Choose another name",
    errno.ENAMETOOLONG: "the name is too long. Choose a shorter one",
}


@contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Turns a refused write (full disk, read-only, no permission) into a `StorageError` that names the path.

    An error about a file elsewhere, such as an unreadable input, passes unchanged.
    """
    path = Path(path)
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            refusal = _refusal(path, error.errno or 0, is_near=_concerns(error, path))
        else:  # safetensors wraps the operating system's error in its own type, with only the text
            refusal = None if isinstance(error, SheepOpError) else _refusal_in(str(error), path)
        if refusal is None:
            raise
        raise refusal from error


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replaces `path` by `content` atomically: readers see the old or the new file, also after a crash."""
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


@contextmanager
def atomic_file(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a path next to `target`; the file there becomes `target`, fsynced, if the block succeeds.

    It is for files too large for memory. If the block raises, the file is removed and `target` is unchanged. Without
    `replace`, an existing target is refused at once.
    """
    target = Path(target)
    if not replace and (target.exists() or target.is_symlink()):
        raise _name_refused(target, errno.EEXIST)
    if target.is_dir():
        raise _name_refused(target, errno.EISDIR)
    temporary = _temporary_beside(target)
    with storage_errors(target):
        make_directory(target.parent)
        try:
            yield temporary
            _sync(temporary)
            temporary.replace(target)
            sync_directory(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def require_writable(directory: str | Path) -> None:
    """Creates `directory` if it is missing; raises `StorageError` if no file can be written there.

    Call it before work whose results go there.
    """
    directory = Path(directory)
    probe = _temporary_beside(directory / "probe")
    with storage_errors(directory):
        if not directory.exists():
            make_directory(directory)
        probe.touch()
        probe.unlink()


def finite(value: Any) -> Any:
    """Returns `value` with None for numbers that are not finite, at any depth, because JSON cannot represent them."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path, error_class: type[SheepOpError] = CheckpointError) -> Any:
    """Reads a JSON file; raises `error_class`, naming the file, if it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error_class(f"{path} is missing.") from None
    except (ValueError, RecursionError) as error:
        raise error_class(f"{path} is damaged: it is not valid JSON ({error}).") from None
    except OSError as error:
        raise error_class(f"{path} cannot be read: {error.strerror}.") from None


@contextmanager
def atomic_directory(target: str | Path, *, replace: bool = False, parents: bool = True) -> Iterator[Path]:
    """Yields a temporary directory that becomes `target`, with checksums and fsynced, if the block succeeds.

    If the block raises, the temporary directory is removed and `target` is unchanged. Without `replace`, a target that
    is not empty is refused at once. With it, the old directory is moved aside during the rename; if the process is
    killed at that moment, `remove_partial` moves it back. Missing parents are created, or refused without `parents`.
    """
    target = Path(target)
    if not replace and (target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise _name_refused(target, errno.EEXIST)
    with storage_errors(target):
        if parents:
            make_directory(target.parent)
        temporary = _temporary_beside(target)
        try:
            temporary.mkdir()
            yield temporary
            publish_directory(temporary, target)
        except BaseException as error:
            is_gone = not temporary.exists()
            remove_tree(temporary)
            if isinstance(error, FileNotFoundError) and is_gone:
                raise StorageError(
                    f"Cannot write {target}: its directory was removed or moved in the meantime."
                ) from error
            raise


def publish_directory(temporary: Path, target: Path) -> None:
    """Writes checksums in a finished directory, fsyncs it and renames it to `target` on the same file system.

    An existing `target` is replaced.
    """
    with storage_errors(target):
        _permit_as_usual(temporary)
        write_checksums(temporary)
        sync_tree(temporary)
        _move_into_place(temporary, target)


def _permit_as_usual(directory: Path) -> None:
    """Adds the read and write permissions of `directory` to its files; safetensors writes them for the owner alone."""
    usual = directory.stat().st_mode & 0o666
    for name in _files_below(directory):
        file = directory / name
        if not file.is_symlink() and (mode := stat.S_IMODE(file.stat().st_mode)) | usual != mode:
            file.chmod(mode | usual)


def _move_into_place(temporary: Path, target: Path) -> None:
    """Renames; removes the old `target` afterwards, or moves it back if the rename fails."""
    aside = _temporary_beside(target, _ASIDE_MARK)
    replaces = target.exists() or target.is_symlink()
    if replaces:
        target.rename(aside)
    try:
        temporary.rename(target)
    except BaseException:
        if replaces:
            aside.rename(target)
        raise
    sync_directory(target.parent)
    if replaces:
        remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Removes a file or directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard_tree(path: Path) -> None:
    """Removes a file or directory tree in which other processes may still be writing.

    It gets another name first, so that nothing can be added to it by its old one.
    """
    aside = _temporary_beside(path)
    path.rename(aside)
    remove_tree(aside)


def remove_partial(directory: str | Path) -> None:
    """Removes temporary files that a killed writer left in `directory`; nobody else may be writing there.

    A target that was moved aside and never replaced is moved back to its name.
    """
    for entry in sorted(Path(directory).glob(".*")):
        if (match := _LEFT_BEHIND.fullmatch(entry.name)) is None:
            continue
        target = entry.with_name(match["target"])
        if match["mark"] == _ASIDE_MARK and not target.exists():
            entry.rename(target)
        else:
            remove_tree(entry)


def is_left_behind(name: str) -> bool:
    """Returns whether `name` is the name of a temporary file or directory, which a killed writer may leave behind."""
    return _LEFT_BEHIND.fullmatch(name) is not None


def sha256_file(path: str | Path) -> str:
    """Returns the hexadecimal SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path) -> None:
    """Writes ``checksums.json`` with the SHA-256 of every other file in `directory`."""
    sums = {name: sha256_file(directory / name) for name in _files_below(directory) if name != CHECKSUMS}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def damaged_files(directory: str | Path, checksum: Callable[[Path], str] = sha256_file) -> list[str]:
    """Returns a line for each file in `directory` that is missing or differs from its checksum; empty if undamaged.

    `checksum` returns the hexadecimal SHA-256 of a file.
    """
    directory = Path(directory)
    record = directory / CHECKSUMS
    if not record.is_file():
        return [f"{record} is missing: the directory was never finished"]
    try:
        expected = {str(name): str(value) for name, value in json.loads(record.read_text(encoding="utf-8")).items()}
    except (ValueError, AttributeError, RecursionError):
        return [f"{record} is damaged: it is not a table of checksums"]
    except OSError as error:
        return [f"{record} cannot be read: {error.strerror}"]
    problems = (_problem(directory, name, value, checksum) for name, value in sorted(expected.items()))
    return [problem for problem in problems if problem]


def _problem(directory: Path, name: str, expected: str, checksum: Callable[[Path], str]) -> str | None:
    file = directory / name
    if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{directory / CHECKSUMS} is damaged: {name!r} is not a file below the directory"
    if not file.is_file():
        return f"{file} is missing"
    try:
        actual = checksum(file)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None if actual == expected else f"{file} is damaged: its checksum differs from the recorded one"


def sync_tree(directory: Path) -> None:
    """Flushes every file and directory in `directory` to the disk."""
    for name in _files_below(directory):
        _sync(directory / name)
    for child in directory.rglob("*"):
        if child.is_dir() and not child.is_symlink():
            sync_directory(child)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Makes new files and renames in `directory` durable."""
    _sync(directory)


def make_directory(directory: Path) -> None:
    """Creates `directory` and its missing parents durably, if they do not exist.

    A file that was flushed inside a new directory is lost in a crash unless the directory's own name was flushed too.
    Raises `StorageError` where no directory can be, as in ``/proc``.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise StorageError(f"Cannot write {directory}: no directory can be there. Choose another place.") from error
    for made in reversed(missing):
        sync_directory(made.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a hard link to the file `source`, or a copy of it where the file system has no such links."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def cache_directory() -> Path:
    """SheepOp's directory in the user's cache; raises `RuntimeError` for a user without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheepop"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files_below(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _temporary_beside(path: Path, mark: str = TEMPORARY_MARK) -> Path:
    return path.with_name(f".{path.name}{mark}{uuid.uuid4().hex[:12]}")


def _refusal(path: Path, number: int, *, is_near: bool) -> StorageError | None:
    """Returns the error for a refused write to `path`, or None if it concerns another file; see `_concerns`."""
    if is_near and number in _NAME_REASONS:
        return _name_refused(path, number)
    reason = _SPACE_REASONS.get(number) or (_PLACE_REASONS.get(number) if is_near else None)
    return None if reason is None else StorageError(f"Cannot write {path}: {reason}.")


def _name_refused(path: Path, number: int) -> OutputError:
    return OutputError(f"Cannot write {path}: {_NAME_REASONS[number]}.")


def _refusal_in(text: str, path: Path) -> StorageError | None:
    """Does the same as `_refusal` with the message of a library: a full disk, or an error number and a path."""
    match = _OS_ERROR.search(text)
    number = errno.ENOSPC if os.strerror(errno.ENOSPC) in text else int(match[1]) if match else 0
    return _refusal(path, number, is_near=str(path.parent) in text)


def _concerns(error: OSError, path: Path) -> bool:
    """Returns whether the error is about `path`, a file in it or next to it, or one of its parent directories."""
    if not isinstance(error.filename, str | bytes):
        return True
    named = Path(os.fsdecode(error.filename)).absolute()
    place = path.absolute()
    return place.parent in named.parents or named in (place.parent, *place.parents)
