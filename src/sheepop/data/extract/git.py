"""The files that a local git repository tracks at a revision, without what was generated or copied into it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.errors import DataError
from sheepop.data.discovery import IGNORED_FOLDERS, Skipped, ignore_spec, printable
from sheepop.data.extract.generated import is_generated_name, vendored_folder
from sheepop.data.extract.git_blobs import BlobReader
from sheepop.data.extract.git_program import git_output
from sheepop.data.extract.interface import ExtractionError
from sheepop.data.extract.licenses import guess_license
from sheepop.data.pipeline.inventory import Entry

GIT_PREFIX = "git+"
"""What a path begins with that means a repository: ``git+PATH`` or ``git+PATH@REVISION``."""

_SUBMODULE = 0o160000
_LICENSE_NAMES = ("license", "licence", "copying", "unlicense")
_LICENSE_BYTES = 2**20
_ATTRIBUTES = (("linguist-generated", "generated"), ("linguist-vendored", "vendored"))
_READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TrackedFile:
    """A file of a repository: its printable path in it, the full hash of its blob, and its size in bytes."""

    name: str
    blob: str
    size: int


@dataclass(frozen=True, slots=True)
class Repository:
    """The tree of a `commit` (full hash): the files to read in the order of their paths, and those left out, with why.

    `license` is the SPDX identifier of the licence in `license_file` (several with commas), empty when there is none
    or it is not known.
    """

    path: Path
    commit: str
    files: tuple[TrackedFile, ...]
    skipped: tuple[Skipped, ...]
    license: str
    license_file: str


def repository_entries(spec: str, *, max_file_bytes: int, ignore: Iterable[str] = ()) -> Iterator[Entry | Skipped]:
    """The inputs of a build that ``git+PATH@REVISION`` stands for, named ``FOLDER@COMMIT/PATH``.

    Raises `DataError` when the path, the repository or the revision does not exist.
    """
    found = list_repository(spec, max_file_bytes=max_file_bytes, ignore=ignore)
    facts = {"revision": found.commit, "license": found.license, "license_file": found.license_file}
    kept = tuple((name, value) for name, value in facts.items() if value)
    label = f"{printable(found.path.resolve().name)}@{found.commit[:12]}"
    for skipped in found.skipped:
        source = f"{label}/{skipped.source}"
        yield Skipped(source, skipped.stage, skipped.reason, skipped.detail, skipped.is_directory)
    for file in found.files:
        yield Entry("git", str(found.path), f"{label}/{file.name}", file.size, revision=file.blob, facts=kept)


def list_repository(spec: str, *, max_file_bytes: int, ignore: Iterable[str] = ()) -> Repository:
    """What the repository in `spec` tracks at its revision, HEAD when none is given.

    Left out are hidden names, folders of foreign code, generated files, what matches `ignore`, links, submodules,
    and empty and oversized files. Raises `DataError` as `repository_entries` does.
    """
    path, revision = parse_spec(spec)
    commit = _commit(path, revision)
    tracked = list(_tree(path, commit))
    marked = _marked(path, commit, [name for _, _, _, name in tracked])
    sorting = _Sorting(max_file_bytes, ignore, marked)
    for mode, blob, size, name in tracked:
        sorting.add(mode, blob, size, name)
    license_name, license_file = _license(path, tracked)
    return Repository(path, commit, tuple(sorting.files), tuple(sorting.skipped), license_name, license_file)


def parse_spec(spec: str) -> tuple[Path, str]:
    """Folder and revision of ``git+PATH@REVISION``; the longest part before an ``@`` that is a folder is the path."""
    text = spec.removeprefix(GIT_PREFIX)
    ends = [len(text), *(place for place in range(len(text) - 1, 0, -1) if text[place] == "@")]
    for end in ends:
        if text[:end] and Path(text[:end]).is_dir():
            return Path(text[:end]).absolute(), text[end + 1 :] or "HEAD"
    raise DataError(f"Data path {printable(spec)} names no folder. Write git+PATH or git+PATH@REVISION.")


class _Sorting:
    """Decides for each tracked file whether it is read; a folder that is left out is named once."""

    def __init__(self, max_file_bytes: int, ignore: Iterable[str], marked: dict[bytes, str]) -> None:
        self.files: list[TrackedFile] = []
        self.skipped: list[Skipped] = []
        self._max_file_bytes, self._ignore, self._marked = max_file_bytes, ignore_spec(ignore), marked
        self._folders: set[str] = set()

    def add(self, mode: int, blob: str, size: int, raw: bytes) -> None:
        name = printable(os.fsdecode(raw))
        *folders, last = name.split("/")
        reason, detail, depth = self._left_out_folder(folders)
        if depth:
            folder = "/".join(folders[:depth])
            if folder not in self._folders:
                self._folders.add(folder)
                self.skipped.append(Skipped(folder, "discover", reason, detail, is_directory=True))
            return
        refusal = self._refusal(mode, size, name, last) or self._by_attribute(raw)
        if refusal:
            self.skipped.append(Skipped(name, "discover", *refusal))
        else:
            self.files.append(TrackedFile(name, blob, size))

    def _left_out_folder(self, folders: list[str]) -> tuple[str, str, int]:
        vendored = vendored_folder(folders)
        for depth, folder in enumerate(folders, 1):
            if folder.startswith("."):
                return "hidden", "its name begins with a dot", depth
            if depth == vendored:
                return "vendored", "folders with this name hold code from other projects", depth
            if folder in IGNORED_FOLDERS:
                return "ignored", "folders with this name are never read", depth
        return "", "", 0

    def _refusal(self, mode: int, size: int, name: str, last: str) -> tuple[str, str] | None:
        if mode == _SUBMODULE:
            return "unsupported", "it is a submodule; give that repository by itself"
        if not stat.S_ISREG(mode):
            return "unsafe", "it is a symbolic link"
        if last.startswith("."):
            return "hidden", "its name begins with a dot"
        if self._ignore.match_file(name):
            return "ignored", "it matches an ignore pattern"
        if is_generated_name(last):
            return "generated", "files with this name are generated"
        if size == 0:
            return "empty", "0 bytes"
        if size > self._max_file_bytes:
            return "oversized", f"{size:,} bytes, over data.max_file_bytes = {self._max_file_bytes:,}"
        return None

    def _by_attribute(self, raw: bytes) -> tuple[str, str] | None:
        attribute = self._marked.get(raw)
        return (attribute, ".gitattributes says so") if attribute else None


def _commit(path: Path, revision: str) -> str:
    git_output(path, "rev-parse", "--git-dir")
    try:
        if revision.startswith("-"):
            raise DataError("it would be an option")
        output = git_output(path, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except DataError:
        raise DataError(f"The repository {path} has no revision {revision}. Give a branch, tag or commit.") from None
    return output.decode("ascii").strip()


def _tree(path: Path, commit: str) -> Iterator[tuple[int, str, int, bytes]]:
    """Mode, blob, size (0 for a submodule) and path of everything in the commit's tree."""
    output = git_output(path, "ls-tree", "-r", "-z", "--long", "--full-tree", commit)
    for line in output.split(b"\0")[:-1]:
        about, _, name = line.partition(b"\t")
        mode, _, blob, size = about.split()
        yield int(mode, 8), blob.decode("ascii"), int(size) if size != b"-" else 0, name


def _marked(path: Path, commit: str, names: list[bytes]) -> dict[bytes, str]:
    """The files that the tree's ``.gitattributes`` call generated or vendored, as git itself reads them."""
    if not any(name.rpartition(b"/")[2] == b".gitattributes" for name in names):
        return {}
    marked: dict[bytes, str] = {}
    with tempfile.TemporaryDirectory(prefix="sheepop-git-") as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git_output(path, "read-tree", commit, environment=index)
        attributes = [attribute for attribute, _ in _ATTRIBUTES]
        asked = b"".join(name + b"\0" for name in names)
        arguments = ("check-attr", "--cached", "--stdin", "-z", *attributes)
        fields = git_output(path, *arguments, data=asked, environment=index).split(b"\0")
    reasons = {attribute.encode("ascii"): reason for attribute, reason in _ATTRIBUTES}
    for name, attribute, value in zip(fields[0::3], fields[1::3], fields[2::3], strict=False):
        if value in (b"set", b"true"):
            marked.setdefault(name, reasons[attribute])
    return marked


def _license(path: Path, tracked: list[tuple[int, str, int, bytes]]) -> tuple[str, str]:
    """SPDX identifiers and names of the licence files at the top of the tree."""
    identifiers, names = [], []
    with closing(BlobReader(path, _READ_SECONDS)) as reader, tempfile.TemporaryDirectory() as scratch:
        for mode, blob, size, raw in tracked:
            name = printable(os.fsdecode(raw))
            if "/" in name or not stat.S_ISREG(mode) or not name.lower().startswith(_LICENSE_NAMES):
                continue
            if size > _LICENSE_BYTES:
                continue
            names.append(name)
            try:
                with reader.content(blob, name, Path(scratch)) as content:
                    identifiers.append(guess_license(content.head(_LICENSE_BYTES).decode("utf-8", "replace")))
            except ExtractionError:
                continue
    return ", ".join(sorted({identifier for identifier in identifiers if identifier})), ", ".join(names)
