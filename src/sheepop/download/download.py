"""Downloads one dataset from the hub to a folder: plans, checks the disk, transfers, records, renames at the end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError, UsageError
from sheepop.core.facts import counted
from sheepop.core.files import (
    read_json,
    remove_tree,
    sha256_file,
    storage_errors,
    sync_directory,
    sync_tree,
    write_atomic,
    write_json,
)
from sheepop.core.hub import CONVERTED, Hub, HubFile
from sheepop.core.locks import exclusive_lock
from sheepop.download.catalog import HUB, Request, find
from sheepop.download.excerpt import can_be_cut, excerpt_name, take_excerpt, text_column
from sheepop.download.selection import Selection, select
from sheepop.report.formatting import data_size

_FILES, _LOCK, _BEGUN = "files", "lock", "begun.json"
# Bytes to leave free on the disk.
_MARGIN = 2**24
_RECORD, _IGNORE = "download.json", ".sheepopignore"
_FORMAT_VERSION = 1
# Control characters, backslashes, and lone surrogates.
_NO_NAME = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# The least remainder of the limit that is worth a request.
_LEAST_EXCERPT = 2**10


def download_dataset(
    name: str, output: Path, *, limit: int | None = None, token: str | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Downloads the dataset `name` (see `catalog`) to a folder below `output`; returns its record and its `path`.

    With `limit`, transfers about that many bytes. The folder appears when it is complete; until then, the same call
    resumes from the files kept beside it. An existing folder with this download stays unchanged. Raises `UsageError`
    for an unknown name, `DataError` if the hub refuses or lacks something, `StorageError` if the disk is too full.
    """
    console = console or Console.silent()
    request = find(name, limit)
    target = output / request.folder
    hub = Hub(token)
    with _held(target) as workplace:
        record = _read_finished(target, request)
        if record is None:
            selection = _planned(hub, request, workplace, console)
            _announce(selection, hub, workplace, console)
            _transfer(hub, selection, workplace / _FILES, console)
            record = _publish(selection, hub.name, workplace / _FILES, target)
        else:
            revision = record["revision"]
            newer = hub.newer(record["repository"], revision, converted=record["converted"])
            console.info(
                f"{target} already holds {request.name} at commit {revision[:12]}."
                + (f" The hub now has {newer[:12]}; remove the folder to download that commit." if newer else "")
            )
        _clear(workplace)
    return {"path": str(target), **record, "next": _suggestion(target, record)}


def dataset_files(
    name: str, output: Path = Path("data"), console: Console | None = None, columns: str = "tuning.columns"
) -> list[Path]:
    """The files of a split of the dataset `name`, by default of ``train``, downloaded below `output`.

    Raises `UsageError` for a name with a column, which says that the setting `columns` names them, and what
    `download_dataset` raises.
    """
    request = find(name)
    if name.startswith(HUB) and request.column is not None:
        raise UsageError(f"{name} names a column. Leave it out, and name columns with {columns}.")
    if request.split is None:
        name = f"{name}:train"
    record = download_dataset(name, output, console=console)
    return [Path(record["path"]) / file["file"] for file in record["files"]]


@contextmanager
def _held(target: Path) -> Iterator[Path]:
    """Locks the directory beside `target` in which a download is collected."""
    workplace = target.with_name(f".{target.name}.downloading")
    busy = DataError(f"Another process is downloading {target} right now. Wait for it to finish.")
    with exclusive_lock(workplace / _LOCK, busy):
        try:
            yield workplace
        finally:
            if [entry.name for entry in workplace.iterdir()] == [_LOCK]:
                remove_tree(workplace)


def _clear(workplace: Path) -> None:
    for entry in workplace.iterdir():
        if entry.name != _LOCK:
            remove_tree(entry)


def _planned(hub: Hub, request: Request, workplace: Path, console: Console) -> Selection:
    """Selects what to transfer, from the commits of a stopped download here, else from the newest."""
    requested = {"name": request.name, "limit": request.limit, "hub": hub.name}
    hub.commits = _begun(workplace, requested)
    resumed = bool(hub.commits)
    selection = select(hub, request)
    repository, revision = selection.contents.repository, selection.contents.revision
    if resumed and (newer := hub.newer(repository, revision, converted=selection.converted)):
        console.warn(
            f"{repository} has changed since this download began. It continues with the commit it began with, "
            f"{revision[:12]}; remove {workplace} to start again with {newer[:12]}."
        )
    column, names = text_column(hub, selection)
    if column is None and names and not resumed:
        console.warn(
            f"SheepOp cannot tell which column is the text. {request.name} has {', '.join(names)}: set "
            "data.extract.column or data.extract.template when you build with it."
        )
    selection = _plan(replace(selection, column=column))
    if not resumed:
        _clear(workplace)
        with storage_errors(workplace):
            write_json(workplace / _BEGUN, {**requested, "commits": hub.commits})
    return selection


def _begun(workplace: Path, requested: dict[str, Any]) -> dict[str, str]:
    """The commits of a stopped download in `workplace`, or none; raises `DataError` if it was a different one."""
    try:
        begun = read_json(workplace / _BEGUN, DataError)
        commits = {str(branch): str(commit) for branch, commit in begun.pop("commits").items()}
        name, limit, hub = begun["name"], begun["limit"], begun["hub"]
    except (DataError, KeyError, TypeError, AttributeError):
        return {}
    if begun != requested:
        raise DataError(
            f"{workplace} holds a stopped download of {name}, {_extent(limit)}, from {hub}. Run that command again to "
            "resume it, or remove the folder."
        )
    return commits


def _announce(selection: Selection, hub: Hub, workplace: Path, console: Console) -> None:
    """Prints what will be transferred; raises `StorageError` if the disk has too little space."""
    there = sum(path.stat().st_size for path in workplace.rglob("*") if path.is_file())
    left = max(0, selection.transfer - there)
    free = shutil.disk_usage(workplace).free
    request, contents, listed = selection.request, selection.contents, selection.files
    all_bytes = sum(file.size for file in listed)
    of_all = "" if request.limit is None else f" of {data_size(all_bytes)} in {counted(len(listed), 'file')}"
    branch = f", branch {CONVERTED}" if selection.converted else ""
    console.info(
        f"{request.name} is {contents.repository} on {hub.name}, commit {contents.revision[:12]}{branch}: "
        f"{counted(len(selection.taken), 'file')}, {data_size(selection.transfer)}{of_all}"
        f"{f', of which {data_size(left)} is still to come' if there > 2**12 else ''}; {data_size(free)} is free. "
        f"Licence: {selection.licence or 'not stated by its publisher'}.{f' {request.note}' if request.note else ''}"
    )
    if left + _MARGIN > free:
        raise StorageError(
            f"{request.name} needs {data_size(left)} more on {workplace.parent}, where {data_size(free)} is free. Free "
            "some space, choose another output directory, or set a limit to download only the beginning."
        )


def _transfer(hub: Hub, selection: Selection, directory: Path, console: Console) -> None:
    """Downloads every selected file below `directory`; a file gets its final name when it is complete."""
    with console.progress(f"Downloading {selection.request.name}", selection.transfer / 1e6, "MB") as progress:
        for file in selection.taken:
            progress.describe(file.target)
            target = directory / file.target
            if target.is_file():
                progress.advance(file.transfer / 1e6)
                continue
            part = target.with_name(f"{target.name}.part")
            with storage_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                if file.limit is None:
                    hub.bring(selection.contents, file, part, progress)
                else:
                    if not take_excerpt(hub, selection.contents, file, part, file.limit):
                        part.unlink()
                        # After other files, it is fine if nothing of the last one fits.
                        if len(selection.taken) == 1:
                            raise DataError(
                                f"No whole row or line of {file.path} ({file.size:,} bytes) fits in the limit of "
                                f"{file.limit:,} bytes. Raise the limit, or leave it out."
                            )
                    progress.advance(file.limit / 1e6)
                if part.is_file():
                    part.rename(target)
                    sync_directory(target.parent)


def _plan(selection: Selection) -> Selection:
    """Adds the files to transfer to `selection`: all of them, or the first ones within the limit.

    Raises `DataError` if the first file cannot be cut to the limit, if a file name is unsafe, and if the whole dataset
    was requested but the hub has only its beginning.
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
    # Some file systems ignore the case of names.
    seen = {_RECORD: ""}
    for file in taken:
        other = seen.setdefault(file.target.casefold(), file.path)
        if other != file.path:
            raise DataError(f"The dataset's file {file.path!r} would overwrite {other or _RECORD!r}.")
    return replace(selection, taken=tuple(taken))


def _within(files: Iterable[HubFile], limit: int) -> list[HubFile]:
    """The first files that fit in `limit` bytes, and the beginning of the next one."""
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
    """Normalizes a path chosen by the owner of a dataset; raises `DataError` if it is hidden or leaves the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or _NO_NAME.search(path) or any(part.startswith(".") for part in parts):
        raise DataError(f"The dataset has a file named {path!r}, which is not safe to write to a folder.")
    if any(len(part.encode("utf-8")) > 200 for part in parts):
        raise DataError(f"The dataset has a file whose name is too long: {path[:80]!r}...")
    return "/".join(parts)


def _read_finished(target: Path, request: Request) -> dict[str, Any] | None:
    """The record of a finished download at `target`, or None; raises `DataError` if something else is there."""
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
                f"{target} holds {record['name']}, downloaded {_extent(record['limit'])}, but you asked for "
                f"{request.name}, {_extent(request.limit)}. Remove it, or choose another output directory."
            )
        for file in record["files"]:
            path = target / file["file"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise DataError(f"{path} is missing or damaged. Remove {target} to download it again.")
    except (KeyError, TypeError):
        raise DataError(f"{target / _RECORD} is damaged. Remove {target} to download it again.") from None
    return record


def _extent(limit: int | None) -> str:
    return "whole" if limit is None else f"with a limit of {limit:,} bytes"


def _publish(selection: Selection, hub: str, directory: Path, target: Path) -> dict[str, Any]:
    """Writes the record of the download from `hub` to `directory`, and renames that folder to `target`."""
    places = [(file, directory / file.target) for file in selection.taken]
    files: list[dict[str, Any]] = [
        {
            "file": file.target,
            "split": file.split,
            "bytes": path.stat().st_size,
            "sha256": file.sha256 if file.limit is None and file.sha256 else sha256_file(path),
            "origin": file.path,
            "whole": file.limit is None,
        }
        for file, path in places
        if path.is_file()
    ]
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
        # A corpus build must not read the record.
        write_atomic(directory / _IGNORE, f"/{_RECORD}\n")
        sync_tree(directory)
        if target.is_dir():
            target.rmdir()
        directory.rename(target)
    return record


def _suggestion(target: Path, record: dict[str, Any]) -> str:
    """The command that builds a corpus from a download, or from its training files if it has others too."""
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
