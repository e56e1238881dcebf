"""What a download will transfer: which files, where each goes in the folder, and how much of the last one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sheepop.core.errors import DataError
from sheepop.data.download.catalog import Request
from sheepop.data.download.excerpt import can_be_cut, excerpt_name
from sheepop.data.download.hub import HubFile
from sheepop.data.download.selection import Selection

RECORD = "download.json"
# Control characters, the other system's separator, and what is no Unicode text.
_NO_NAME = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# A remainder of the limit that holds less than this is not worth a request.
_LEAST_EXCERPT = 2**10


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of the repository, where it goes in the folder, and of how many bytes the transfer may be.

    `limit` null takes the file whole.
    """

    file: HubFile
    target: str
    split: str
    limit: int | None = None

    @property
    def transfer(self) -> int:
        """Bytes to transfer at most."""
        return self.file.size if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be transferred of a `selection`. `column` is the one that holds the text, where that is known."""

    request: Request
    selection: Selection
    column: str | None
    limit: int | None
    files: tuple[PlannedFile, ...]

    @property
    def transfer(self) -> int:
        """Bytes to transfer at most."""
        return sum(planned.transfer for planned in self.files)

    @property
    def licence(self) -> str | None:
        """What the card of the dataset says, else what was known beforehand."""
        card = self.selection.contents.card
        said = card.get("license")
        if isinstance(said, list):
            said = ", ".join(str(item) for item in said)
        named = card.get("license_name")
        said = named if said == "other" and isinstance(named, str) else said
        if isinstance(said, str) and said.strip() and said.strip().lower() not in ("unknown", "other"):
            return " ".join(said.split())[:200]
        return self.request.licence


def make_plan(request: Request, selection: Selection, column: str | None, limit: int | None) -> Plan:
    """The files of `selection`, whole, or as many of the first ones as come within `limit` bytes.

    Raises `DataError` for a limit that the first file cannot be cut to, for a name that is no name of a file below a
    folder, and for the beginning of a dataset where all of it was asked for.
    """
    if selection.partial and limit is None:
        raise DataError(
            f"The hub has converted only the beginning of {selection.contents.repository} to Parquet, and the "
            "dataset itself is made by a script, which SheepOp does not run. With a limit you get that beginning; "
            "the whole dataset cannot be downloaded."
        )
    files = [PlannedFile(chosen.file, _safe_name(chosen.file.path), chosen.split) for chosen in selection.files]
    taken = files if limit is None else _within(files, limit)
    _require_distinct(taken)
    return Plan(request, selection, column, limit, tuple(taken))


def _within(files: Sequence[PlannedFile], limit: int) -> list[PlannedFile]:
    """The first of `files` that fit in `limit` bytes, and the beginning of the next."""
    taken: list[PlannedFile] = []
    left = limit
    for planned in files:
        if planned.file.size > left:
            path = planned.file.path
            if can_be_cut(path) and left >= _LEAST_EXCERPT:
                taken.append(PlannedFile(planned.file, excerpt_name(planned.target), planned.split, left))
            elif not taken:
                why = (
                    "is too small to be of use" if can_be_cut(path) else f"is too small for {path}, which cannot be cut"
                )
                raise DataError(
                    f"The limit of {limit:,} bytes {why}. The first file has {planned.file.size:,} bytes: raise the "
                    "limit, or leave it out."
                )
            break
        taken.append(planned)
        left -= planned.file.size
    return taken


def _safe_name(path: str) -> str:
    """`path`, which the owner of a dataset chose, when it is that of a visible file somewhere below a folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or _NO_NAME.search(path) or any(part.startswith(".") for part in parts):
        raise DataError(f"The dataset has a file named {path!r}, which is not safe to write to a folder.")
    if any(len(part.encode("utf-8")) > 200 for part in parts):
        raise DataError(f"The dataset has a file whose name is too long: {path[:80]!r}...")
    return "/".join(parts)


def _require_distinct(files: Sequence[PlannedFile]) -> None:
    # Some file systems take names in upper and lower case for the same.
    seen = {RECORD: ""}
    for planned in files:
        other = seen.setdefault(planned.target.casefold(), planned.file.path)
        if other != planned.file.path:
            raise DataError(f"The dataset's file {planned.file.path!r} would overwrite {other or RECORD!r}.")
