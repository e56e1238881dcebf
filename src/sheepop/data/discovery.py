"""Finds the files below the given paths, in a fixed order, and the reason for each file that is skipped.

The walk visits folders in the order of their names and uses an explicit stack, so recursion does not limit the depth.
It enters every real folder once, even if several symbolic links lead to it, so loops end.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pathspec

from sheepop.core.errors import DataError
from sheepop.data.extract.interface import Span
from sheepop.data.manifest import is_corpus

IGNORED_FOLDERS = frozenset({"__pycache__", "node_modules", "__MACOSX"})
IGNORE_FILES = (".gitignore", ".sheepopignore")


@dataclass(frozen=True, slots=True)
class Entry:
    """One input: a file at `path`, the blob `revision` of the git repository at `path`, or the rows of the query.

    `source` is the printable name relative to the given path, `size` the length in bytes (0 for a query), `modified_ns`
    the modification time. `facts` are passed on to the documents. With a `span` only that part of the file is meant.
    """

    type: Literal["file", "git", "query"]
    path: str
    source: str
    size: int
    modified_ns: int = 0
    revision: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, or with `is_directory` a whole folder, that is skipped, and why."""

    source: str
    reason: str
    detail: str
    is_directory: bool = False

    def as_record(self) -> dict[str, str]:
        """The line of ``quarantine.jsonl``; the name of a folder ends in a slash."""
        name = f"{self.source}/" if self.is_directory else self.source
        return {"file": name, "stage": "discover", "reason": self.reason, "detail": self.detail}


def require_paths(paths: Iterable[Path]) -> None:
    """Raises `DataError` for a path that does not exist."""
    for path in paths:
        if not os.path.lexists(path):
            raise DataError(f"Data path {printable(str(path))} does not exist. Give a file or a folder with text.")


def discover(
    paths: Iterable[str],
    *,
    max_file_bytes: int,
    ignore: Iterable[str] = (),
    leave_out: Iterable[Path] = (),
    follow_links: bool = False,
) -> Iterator[Entry | Skipped]:
    """Yields every file below `paths`, sorted by name within each folder, as an `Entry` to read or as `Skipped`.

    A path in `paths` is taken even if it is hidden or matches a pattern. A symbolic link that leads out of the given
    paths is skipped unless `follow_links`. The directories `leave_out`, which the build writes to, are omitted without
    a record. Raises `DataError` if a path does not exist.
    """
    given = [Path(path) for path in paths]
    require_paths(given)
    inside = None if follow_links else [os.path.realpath(path) for path in given]
    walk = _Walk(max_file_bytes, ignore_spec(ignore), leave_out, inside)
    for path, label in zip(given, input_labels(given), strict=True):
        yield from walk.below(path, label, alone=len(given) == 1)


def input_labels(paths: Iterable[Path]) -> list[str]:
    """A distinct printable name for each input: its last component, with a number if two are the same."""
    labels: list[str] = []
    for path in paths:
        name = printable(Path(os.path.abspath(path)).name or "root")  # noqa: PTH100 - resolves "..", keeps links
        label, number = name, 1
        while label in labels:
            number += 1
            label = f"{name} ({number})"
        labels.append(label)
    return labels


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become ``\\xNN``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def name_refusal(name: str, *, is_directory: bool) -> tuple[str, str] | None:
    """Returns the reason and the detail for skipping a file or folder of this name; None if it is not skipped."""
    if name.startswith("."):
        return "hidden", "its name begins with a dot"
    if is_directory and name in IGNORED_FOLDERS:
        return "ignored", "folders with this name are never read"
    return None


def size_refusal(size: int, max_file_bytes: int) -> tuple[str, str] | None:
    """Returns the reason and the detail for skipping a file of this size; None if it is not skipped."""
    if size == 0:
        return "empty", "0 bytes"
    if size > max_file_bytes:
        return "oversized", f"{size:,} bytes, over data.max_file_bytes = {max_file_bytes:,}"
    return None


def ignore_spec(patterns: Iterable[str]) -> pathspec.GitIgnoreSpec:
    """Compiles ``.gitignore`` patterns; raises ValueError that names an invalid one."""
    lines = list(patterns)
    for line in lines:
        if not _is_pattern(line):
            raise ValueError(f"the pattern {line!r} is not a valid .gitignore pattern")
    return pathspec.GitIgnoreSpec.from_lines(lines)


def _is_pattern(line: str) -> bool:
    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder in the walk: path, prefix of printable names, path relative to the input, ignore rules by folder."""

    path: str
    prefix: str
    relative: str = ""
    rules: tuple[tuple[str, pathspec.GitIgnoreSpec], ...] = ()

    def source(self, name: str) -> str:
        return self.prefix + printable(self.relative + name)

    def is_ignored(self, name: str, is_directory: bool, configured: pathspec.GitIgnoreSpec) -> bool:
        """Whether `name` is ignored: the configured patterns win, then, as in git, the deepest ignore file."""
        relative = self.relative + name + ("/" if is_directory else "")
        for prefix, spec in (("", configured), *reversed(self.rules)):
            include = spec.check_file(relative[len(prefix) :]).include
            if include is not None:
                return bool(include)
        return False


class _Walk:
    def __init__(
        self,
        max_file_bytes: int,
        ignore: pathspec.GitIgnoreSpec,
        leave_out: Iterable[Path],
        inside: Sequence[str] | None,
    ) -> None:
        self._max_file_bytes, self._ignore, self._inside = max_file_bytes, ignore, inside
        self._entered: set[tuple[int, int]] = set()
        self._left_out = {_identity(path.stat()) for path in leave_out if path.exists()}

    def below(self, path: Path, label: str, *, alone: bool) -> Iterator[Entry | Skipped]:
        try:
            status = path.stat()
        except OSError as error:
            yield Skipped(label, "unreadable", _reason(error))
            return
        if not stat.S_ISDIR(status.st_mode):
            yield self._file(str(path), label, status)
            return
        self._entered.add(_identity(status))
        # A stack of unfinished folders: memory grows with the depth, not with the size of the tree.
        stack = [self._items(_Folder(str(path), "" if alone else f"{label}/"))]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
            elif isinstance(item, _Folder):
                stack.append(self._items(item))
            else:
                yield item

    def _items(self, folder: _Folder) -> Iterator[Entry | Skipped | _Folder]:
        try:
            with os.scandir(folder.path) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            source = folder.prefix + printable(folder.relative.rstrip("/"))
            yield Skipped(source, "unreadable", _reason(error), is_directory=True)
            return
        names, problems = {entry.name for entry in entries}, {}
        for name in IGNORE_FILES:
            if name in names:
                try:
                    rules = (*folder.rules, (folder.relative, _read_rules(f"{folder.path}/{name}")))
                    folder = replace(folder, rules=rules)
                except OSError as error:
                    problems[name] = f"ignore rules: {_reason(error)}"
        for entry in entries:
            if entry.name in problems:
                yield Skipped(folder.source(entry.name), "unreadable", problems[entry.name])
            elif (item := self._item(entry, folder)) is not None:
                yield item

    def _item(self, entry: os.DirEntry[str], folder: _Folder) -> Entry | Skipped | _Folder | None:
        source = folder.source(entry.name)
        try:
            status = entry.stat()
        except OSError as error:
            # A broken or circular link has no status.
            return Skipped(source, "unreadable", _reason(error))
        identity, is_directory = _identity(status), stat.S_ISDIR(status.st_mode)
        if identity in self._left_out:
            return None
        if refusal := name_refusal(entry.name, is_directory=is_directory):
            return Skipped(source, *refusal, is_directory)
        if folder.is_ignored(entry.name, is_directory, self._ignore):
            return Skipped(source, "ignored", "it matches an ignore pattern", is_directory)
        if entry.is_symlink() and (refusal := self._leads_out(entry.path)):
            return Skipped(source, *refusal, is_directory)
        if not is_directory:
            return self._file(entry.path, source, status)
        if identity in self._entered:
            return Skipped(source, "repeated", "this folder was already read under another path", True)
        if is_corpus(entry.path):
            return Skipped(source, "corpus", "it is a finished corpus, not text", True)
        self._entered.add(identity)
        return replace(folder, path=entry.path, relative=f"{folder.relative}{entry.name}/")

    def _leads_out(self, path: str) -> tuple[str, str] | None:
        """Reason and detail why a link is not followed, or None."""
        target = os.path.realpath(path)
        if self._inside is None or any(os.path.commonpath([target, root]) == root for root in self._inside):
            return None
        return "link", "it leads out of the input; data.follow_links=true reads what it leads to"

    def _file(self, path: str, source: str, status: os.stat_result) -> Entry | Skipped:
        if not stat.S_ISREG(status.st_mode):
            return Skipped(source, "special", "it is a pipe, socket or device, not a regular file")
        if refusal := size_refusal(status.st_size, self._max_file_bytes):
            return Skipped(source, *refusal)
        return Entry("file", path, source, status.st_size, status.st_mtime_ns)


def _read_rules(path: str) -> pathspec.GitIgnoreSpec:
    """The patterns of an ignore file; as in git, a line that is not a valid pattern matches nothing."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - the path may contain bytes that are not UTF-8
        raise OSError(0, "it is not a regular file")
    with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        lines = file.read(2**20).splitlines()
    return pathspec.GitIgnoreSpec.from_lines(filter(_is_pattern, lines))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
