"""What is taken of a selection, and what a finished download says of itself: ``download.json`` beside its files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, sha256_file, storage_errors, sync_tree, write_atomic, write_json
from sheepop.data.download.catalog import Request
from sheepop.data.download.excerpt import can_be_cut, excerpt_name
from sheepop.data.download.hub import HubFile
from sheepop.data.download.selection import Selection

_RECORD, _IGNORE = "download.json", ".sheepopignore"
_FORMAT_VERSION = 1
# Control characters, the other system's separator, and what is no Unicode text.
_NO_NAME = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# A remainder of the limit that holds less than this is not worth a request.
_LEAST_EXCERPT = 2**10


def plan(selection: Selection) -> Selection:
    """`selection` with what is taken of it: its files whole, or as many of the first as come within the limit.

    Raises `DataError` for a limit that the first file cannot be cut to, for a name that is no name of a file below a
    folder, and for the beginning of a dataset where all of it was asked for.
    """
    limit = selection.request.limit
    if selection.partial and limit is None:
        raise DataError(
            f"The hub has converted only the beginning of {selection.contents.repository} to Parquet, and the "
            "dataset itself is made by a script, which SheepOp does not run. With a limit you get that beginning; "
            "the whole dataset cannot be downloaded."
        )
    files = [replace(file, target=_safe_name(file.path)) for file in selection.files]
    taken = files if limit is None else _within(files, limit)
    # Some file systems take names in upper and lower case for the same.
    seen = {_RECORD: ""}
    for file in taken:
        other = seen.setdefault(file.target.casefold(), file.path)
        if other != file.path:
            raise DataError(f"The dataset's file {file.path!r} would overwrite {other or _RECORD!r}.")
    return replace(selection, taken=tuple(taken))


def _within(files: Iterable[HubFile], limit: int) -> list[HubFile]:
    """The first of `files` that fit in `limit` bytes, and the beginning of the next."""
    taken: list[HubFile] = []
    left = limit
    for file in files:
        if file.size > left:
            cut = can_be_cut(file.path)
            if cut and left >= _LEAST_EXCERPT:
                taken.append(replace(file, target=excerpt_name(file.target), limit=left))
            elif not taken:
                raise DataError(
                    f"The limit of {limit:,} bytes is too small "
                    f"{'to be of use' if cut else f'for {file.path}, which cannot be cut'}. The first file has "
                    f"{file.size:,} bytes: raise the limit, or leave it out."
                )
            break
        taken.append(file)
        left -= file.size
    return taken


def _safe_name(path: str) -> str:
    """`path`, which the owner of a dataset chose, when it is that of a visible file somewhere below a folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or _NO_NAME.search(path) or any(part.startswith(".") for part in parts):
        raise DataError(f"The dataset has a file named {path!r}, which is not safe to write to a folder.")
    if any(len(part.encode("utf-8")) > 200 for part in parts):
        raise DataError(f"The dataset has a file whose name is too long: {path[:80]!r}...")
    return "/".join(parts)


def read_finished(target: Path, request: Request) -> dict[str, Any] | None:
    """The record of a download that is there already; raises `DataError` when something else is."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / _RECORD).is_file():
        raise DataError(f"{target} already exists and is not a download. Choose another output directory.")
    record: dict[str, Any] = read_json(target / _RECORD, DataError)
    try:
        if record["format_version"] != _FORMAT_VERSION:
            raise DataError(
                f"{target / _RECORD} was written by another version of SheepOp. Remove {target} to download it again."
            )
        if (record["name"], record["limit"]) != (request.name, request.limit):
            raise DataError(
                f"{target} holds {record['name']}, downloaded {extent(record['limit'])}, but you asked for "
                f"{request.name}, {extent(request.limit)}. Remove it, or choose another output directory."
            )
        for file in record["files"]:
            path = target / file["file"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise DataError(f"{path} is missing or damaged. Remove {target} to download it again.")
    except (KeyError, TypeError):
        raise DataError(f"{target / _RECORD} is damaged. Remove {target} to download it again.") from None
    return record


def extent(limit: int | None) -> str:
    """How much was asked for, in words."""
    return "whole" if limit is None else f"with a limit of {limit:,} bytes"


def publish(selection: Selection, hub: str, directory: Path, target: Path) -> dict[str, Any]:
    """Records the download from `hub` beside its files in `directory`, and renames that folder to `target`."""
    places = [(file, directory / file.target) for file in selection.taken]
    files = [_file_record(file, path) for file, path in places if path.is_file()]
    request = selection.request
    record = {
        "format_version": _FORMAT_VERSION,
        "name": request.name,
        "hub": hub,
        "repository": selection.contents.repository,
        "revision": selection.contents.revision,
        "converted": selection.converted,
        "subset": selection.subset,
        "split": request.split,
        "column": selection.column,
        "licence": selection.licence,
        "note": request.note,
        "limit": request.limit,
        "complete": len(files) == len(selection.files) and all(file["whole"] for file in files),
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
    }
    with storage_errors(target):
        write_json(directory / _RECORD, record)
        # The record is no text to build a corpus of.
        write_atomic(directory / _IGNORE, f"/{_RECORD}\n")
        sync_tree(directory)
        if target.is_dir():
            target.rmdir()
        directory.rename(target)
    return record


def _file_record(file: HubFile, path: Path) -> dict[str, Any]:
    whole = file.limit is None
    return {
        "file": file.target,
        "split": file.split,
        "bytes": path.stat().st_size,
        "sha256": file.sha256 if whole and file.sha256 else sha256_file(path),
        "origin": file.path,
        "whole": whole,
    }


def suggestion(target: Path, record: dict[str, Any]) -> str:
    """The command that builds a corpus of a download: of its training files, where it has others too."""
    files = [file["file"] for file in record["files"] if file["split"] == "train"]
    others = [file["file"] for file in record["files"] if file["split"] != "train"]
    paths = shlex.quote(str(target))
    if files and others:
        prefix = os.path.commonprefix(files)  # noqa: RUF071 - of characters
        paths = " ".join(shlex.quote(str(target / file)) for file in files)
        if len(files) > 1 and not any(other.startswith(prefix) for other in others):
            paths = f"{shlex.quote(str(target / prefix))}*"
    column = record["column"]
    setting = f" {shlex.quote(f'data.extract.column={column}')}" if column is not None else ""
    return f"sheepop data build {paths} --output {shlex.quote(f'corpora/{target.name}')}{setting}"
