"""Lists and reads the files of a local git repository at a revision, without generated and vendored files.

The git program runs with settings under which nothing in a repository is executed, written or fetched.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pathspec

from sheepop.core.errors import DataError
from sheepop.data.discovery import Entry, Skipped, ignore_spec, name_refusal, printable, size_refusal
from sheepop.data.extract.interface import Content, ExtractionError
from sheepop.data.extract.languages import is_generated_name, words
from sheepop.data.extract.unpacking import spooled

GIT_PREFIX = "git+"
"""The prefix of a path that names a repository: ``git+PATH`` or ``git+PATH@REVISION``."""

_SUBMODULE = 0o160000
_VENDORED_FOLDERS = words(
    "vendor vendored _vendor _vendored third_party third-party thirdparty 3rdparty"
    " node_modules bower_components jspm_packages godeps pods dist"
)
_LICENSE_NAMES = ("license", "licence", "copying", "unlicense")
_LICENSE_BYTES = 2**20
# SPDX identifier, a pattern, and phrases that must occur as well, all in lower case. The earliest match in the text
# decides, since a licence often mentions another further down; for equal positions the first row decides.
_BSD = "redistribution and use in source and binary forms"
_MIT = "permission is hereby granted, free of charge, to any person obtaining a copy"
_LICENSES = (
    ("AGPL-3.0", "gnu affero general public license", "version 3"),
    ("LGPL-3.0", "gnu lesser general public license", "version 3, 29 june 2007"),
    ("LGPL-2.1", "gnu lesser general public license", "version 2.1"),
    ("LGPL-2.0", "gnu library general public license", "version 2"),
    ("GPL-3.0", "gnu general public license", "version 3"),
    ("GPL-2.0", "gnu general public license", "version 2"),
    ("MPL-2.0", r"mozilla public license(?:,? version|, v\.) 2\.0"),
    ("MPL-1.1", r"mozilla public license version 1\.1"),
    ("Apache-2.0", "apache license", "version 2.0"),
    ("EPL-2.0", r"eclipse public license - v 2\.0"),
    ("BSL-1.0", r"boost software license - version 1\.0"),
    ("CC0-1.0", r"cc0 1\.0 universal"),
    ("CC-BY-SA-4.0", r"attribution-sharealike 4\.0 international"),
    ("CC-BY-4.0", r"attribution 4\.0 international"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("PSF-2.0", "python software foundation license version 2"),
    ("BSD-4-Clause", _BSD, "all advertising materials"),
    ("BSD-3-Clause", _BSD, "endorse or promote products"),
    ("BSD-2-Clause", _BSD, "in binary form must reproduce"),
    ("MIT", _MIT, "this permission notice shall be included"),
    ("MIT-0", _MIT),
    ("ISC", "permission to use, copy, modify, and(?:/or)? distribute this software for any purpose"),
    ("Zlib", "this software is provided 'as-is', without any express or implied", "altered source versions"),
)
_SPACE = re.compile(r"\s+")
_MOST_LICENSE_CHARACTERS = 200_000
_ATTRIBUTES = {"linguist-generated": "generated", "linguist-vendored": "vendored"}
_MEMORY_BYTES = 2**31
_SECONDS = 120.0
_LONGEST_HEADER = 200

_SETTINGS = {
    # The user named the repository, so another owner is fine: nothing in it is executed.
    "safe.directory": "*",
    **dict.fromkeys(("core.hooksPath", "core.attributesFile"), os.devnull),
    **dict.fromkeys(("core.fsmonitor", "core.splitIndex", "core.untrackedCache"), "false"),
    "protocol.allow": "never",
}
_ENVIRONMENT = {
    **dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM", "GIT_NO_LAZY_FETCH", "GIT_NO_REPLACE_OBJECTS"), "1"),
    **dict.fromkeys(("GIT_OPTIONAL_LOCKS", "GIT_TERMINAL_PROMPT"), "0"),
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "HOME"), os.devnull),
    "LC_ALL": "C",
}

# Reason and detail.
_Refusal = tuple[str, str]


class _Tracked(NamedTuple):
    """A file of the tree: its mode, the full hash of its blob, its size in bytes, its path and its printable path."""

    mode: int
    blob: str
    size: int
    raw: bytes
    name: str


def repository_entries(spec: str, *, max_file_bytes: int, ignore: Iterable[str] = ()) -> Iterator[Entry | Skipped]:
    """Yields the files that ``git+PATH@REVISION`` names, at HEAD if no revision is given.

    They are named ``FOLDER@COMMIT/PATH``, in the order of their paths, with the revision and the licence as facts: SPDX
    identifiers and file names, separated by commas. Hidden, vendored (each folder reported once), generated, ignored,
    empty and oversized files, links and submodules are skipped. Raises `DataError` if the path, repository or revision
    does not exist.
    """
    path, revision = parse_spec(spec)
    commit = _commit(path, revision)
    tracked = list(_tree(path, commit))
    marked = _marked(path, commit, [file.raw for file in tracked])
    license_name, license_file = _license(path, tracked)
    facts = (("revision", commit), ("license", license_name), ("license_file", license_file))
    known = tuple((name, value) for name, value in facts if value)
    label = f"{printable(path.resolve().name)}@{commit[:12]}"
    ignored, named = ignore_spec(ignore), set[str]()
    for file in tracked:
        *folders, last = file.name.split("/")
        depth, refusal = _left_out_folder(folders)
        source = "/".join([label, *folders[:depth]] if refusal else [label, *folders, last])
        if refusal and source not in named:
            yield Skipped(source, *refusal, is_directory=True)
            named.add(source)
        elif not refusal:
            refusal = _left_out_file(file, last, ignored, max_file_bytes) or marked.get(file.raw)
            if refusal:
                yield Skipped(source, *refusal)
            else:
                yield Entry("git", str(path), source, file.size, revision=file.blob, facts=known)


def parse_spec(spec: str) -> tuple[Path, str]:
    """Returns (PATH, REVISION) of ``git+PATH@REVISION``; of the parts before an ``@``, PATH is the longest folder."""
    text = spec.removeprefix(GIT_PREFIX)
    ends = [len(text), *(place for place in range(len(text) - 1, 0, -1) if text[place] == "@")]
    for end in ends:
        if text[:end] and Path(text[:end]).is_dir():
            return Path(text[:end]).absolute(), text[end + 1 :] or "HEAD"
    raise DataError(f"Data path {printable(spec)} is not a folder. Write git+PATH or git+PATH@REVISION.")


def _left_out_folder(folders: list[str]) -> tuple[int, _Refusal | None]:
    """Returns how many leading folders make up the path of a skipped folder, and why; (0, None) if none is skipped."""
    for depth, folder in enumerate(folders, 1):
        if folder.lower() in _VENDORED_FOLDERS:
            return depth, ("vendored", "folders with this name hold code from other projects")
        if refusal := name_refusal(folder, is_directory=True):
            return depth, refusal
    return 0, None


def _left_out_file(file: _Tracked, last: str, ignored: pathspec.GitIgnoreSpec, max_file_bytes: int) -> _Refusal | None:
    if file.mode == _SUBMODULE:
        return "unsupported", "it is a submodule; give that repository by itself"
    if not stat.S_ISREG(file.mode):
        return "unsafe", "it is a symbolic link"
    if refusal := name_refusal(last, is_directory=False):
        return refusal
    if ignored.match_file(file.name):
        return "ignored", "it matches an ignore pattern"
    if is_generated_name(last):
        return "generated", "files with this name are generated"
    return size_refusal(file.size, max_file_bytes)


def _commit(path: Path, revision: str) -> str:
    _git_output(path, "rev-parse", "--git-dir")
    try:
        if revision.startswith("-"):
            raise DataError("it would be an option")
        output = _git_output(path, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except DataError:
        raise DataError(f"The repository {path} has no revision {revision}. Give a branch, tag or commit.") from None
    return output.decode("ascii").strip()


def _tree(path: Path, commit: str) -> Iterator[_Tracked]:
    """Yields the files and submodules of the commit's tree; a submodule has size 0."""
    for line in _git_output(path, "ls-tree", "-r", "-z", "--long", "--full-tree", commit).split(b"\0")[:-1]:
        about, _, raw = line.partition(b"\t")
        mode, _, blob, size = about.split()
        name = printable(os.fsdecode(raw))
        yield _Tracked(int(mode, 8), blob.decode("ascii"), int(size) if size != b"-" else 0, raw, name)


def _marked(path: Path, commit: str, names: list[bytes]) -> dict[bytes, _Refusal]:
    """Returns the files that ``.gitattributes`` in the tree mark as generated or vendored, as evaluated by git."""
    if not any(name.rpartition(b"/")[2] == b".gitattributes" for name in names):
        return {}
    marked: dict[bytes, _Refusal] = {}
    with tempfile.TemporaryDirectory(prefix="sheepop-git-") as scratch:
        index = str(Path(scratch, "index"))
        _git_output(path, "read-tree", commit, index=index)
        paths = b"".join(name + b"\0" for name in names)
        arguments = ("check-attr", "--cached", "--stdin", "-z", *_ATTRIBUTES)
        fields = _git_output(path, *arguments, data=paths, index=index).split(b"\0")
    for name, attribute, value in zip(fields[0::3], fields[1::3], fields[2::3], strict=False):
        if value in (b"set", b"true"):
            marked.setdefault(name, (_ATTRIBUTES[attribute.decode("ascii")], ".gitattributes says so"))
    return marked


def _license(path: Path, tracked: list[_Tracked]) -> tuple[str, str]:
    """Returns the SPDX identifiers and the names of the licence files at the top of the tree."""
    identifiers, names = set(), []
    for file in tracked:
        is_license = "/" not in file.name and file.name.lower().startswith(_LICENSE_NAMES)
        if not is_license or not stat.S_ISREG(file.mode) or file.size > _LICENSE_BYTES:
            continue
        names.append(file.name)
        # A licence file that cannot be read is still named.
        with suppress(DataError):
            identifiers.add(guess_license(_git_output(path, "cat-file", "blob", file.blob).decode("utf-8", "replace")))
    return ", ".join(sorted(identifiers - {""})), ", ".join(names)


def guess_license(text: str) -> str:
    """Returns the SPDX identifier of the first licence in `text`, or an empty string if it is not a known one."""
    plain = _SPACE.sub(" ", text[:_MOST_LICENSE_CHARACTERS]).lower()
    plain = plain.replace("\u2019", "'").replace("``as is''", "'as is'")
    best, position = "", len(plain)
    for identifier, first, *others in _LICENSES:
        found = re.search(first, plain)
        if found and found.start() < position and all(phrase in plain for phrase in others):
            best, position = identifier, found.start()
    return best


def _start_git(repository: Path, *arguments: str, index: str = "", **streams: Any) -> subprocess.Popen[bytes]:
    """Starts a git command in `repository`, on Linux with bounded memory; raises `DataError` without git."""
    # Git must not search the parent folders for a repository.
    paths = {"GIT_CEILING_DIRECTORIES": str(repository.resolve().parent)}
    paths |= {"GIT_INDEX_FILE": index} if index else {}
    settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
    try:
        process = subprocess.Popen(
            ["git", "--no-pager", *settings, "-C", str(repository), *arguments],
            env={"PATH": os.environ.get("PATH", os.defpath), **_ENVIRONMENT, **paths},
            start_new_session=True,
            **streams,
        )
    except FileNotFoundError:
        raise DataError("Reading a git repository needs the program git. Install it and try again.") from None
    if sys.platform == "linux":
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    return process


def _git_output(repository: Path, *arguments: str, data: bytes = b"", index: str = "") -> bytes:
    """Returns the output of a git command; raises `DataError` with git's own message if it fails or takes too long."""
    pipe = subprocess.PIPE
    with _start_git(repository, *arguments, index=index, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            output, errors = process.communicate(data, timeout=_SECONDS)
        except BaseException as error:
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise DataError(f"git {arguments[0]} in {repository} did not finish within {_SECONDS:g} s.") from None
            raise
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise DataError(f"git {arguments[0]} failed in {repository}: {lines[-1].removeprefix('fatal: ')}.")
    return bytes(output)


class BlobReader:
    """Reads files of a repository by one ``git cat-file --batch``; closes if one takes over `seconds` or is damaged."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._seconds, self.is_open = path, seconds, True
        pipe = subprocess.PIPE
        self._process = _start_git(path, "cat-file", "--batch", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)

    def close(self) -> None:
        """Ends the git process."""
        self.is_open = False
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()

    @contextmanager
    def content(self, blob: str, name: str, scratch: Path) -> Iterator[Content]:
        """Provides the blob with this hash; raises `ExtractionError`: ``missing``, ``damaged``, ``timeout``."""
        begin, limit = time.monotonic(), threading.Timer(self._seconds, self._process.kill)
        limit.start()
        try:
            left = size = self._requested(blob)

            def read(count: int) -> bytes:
                nonlocal left
                count = min(count, left)
                left -= count
                # A line end follows the content.
                data = self._stdout.read(count or 1)
                if len(data) < count or (not count and data != b"\n"):
                    raise _StoppedError
                return data if count else b""

            with spooled(read, name, size, scratch) as content:
                limit.cancel()
                yield content
        except _StoppedError:
            self.close()
            if time.monotonic() - begin >= self._seconds:
                raise ExtractionError("timeout", f"git did not send it within {self._seconds:g} s") from None
            raise ExtractionError("damaged", "git cannot read it") from None
        finally:
            limit.cancel()

    def _requested(self, blob: str) -> int:
        """Requests a blob and returns its size; its bytes are the next that git sends."""
        try:
            self._stdin.write(f"{blob}\n".encode("ascii"))
            self._stdin.flush()
        except OSError:
            raise _StoppedError from None
        fields = self._stdout.readline(_LONGEST_HEADER).split()
        if fields[1:2] == [b"missing"]:
            raise ExtractionError("missing", "the repository does not have this version of it")
        if len(fields) != 3 or fields[1] != b"blob":
            raise _StoppedError
        return int(fields[2])


class _StoppedError(Exception):
    """Git has ended or sent an unexpected answer."""
