"""One dataset from the hub to a folder: planned, checked against the disk, transferred, recorded, and renamed last."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.core.console import Console, Progress
from sheepop.core.errors import DataError, StorageError
from sheepop.core.facts import counted
from sheepop.core.files import read_json, remove_tree, storage_errors, sync_directory, write_json
from sheepop.core.locks import exclusive_lock
from sheepop.data.download.catalog import Request, find
from sheepop.data.download.excerpt import take_excerpt, text_column
from sheepop.data.download.hub import CONVERTED, Contents, Hub, HubFile
from sheepop.data.download.record import extent, plan, publish, read_finished, suggestion
from sheepop.data.download.selection import Selection, select
from sheepop.report.formatting import data_size

_FILES, _LOCK, _BEGUN = "files", "lock", "begun.json"
# Left free on the disk whatever is downloaded.
_MARGIN = 2**24


def download_dataset(
    name: str, output: Path, *, limit: int | None = None, token: str | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Downloads what `name` asks for (see `catalog`) to a folder below `output`; returns its record and its `path`.

    With `limit` about so many bytes are transferred. The folder appears whole when everything has come; until then
    what has come is kept beside it, and the same call goes on with it. A folder that holds this download already is
    left as it is. Raises `UsageError` for a name that means nothing, `DataError` for what the hub refuses or does not
    have, `StorageError` when there is no room.
    """
    console = console or Console.silent()
    request = find(name, limit)
    target = output / request.folder
    hub = Hub(token)
    with _held(target) as workplace:
        record = read_finished(target, request)
        if record is None:
            selection = _planned(hub, request, workplace, console)
            _announce(selection, hub, workplace, console)
            _transfer(hub, selection, workplace / _FILES, console)
            record = publish(selection, hub.name, workplace / _FILES, target)
        else:
            revision = record["revision"]
            newer = hub.newer(record["repository"], revision, converted=record["converted"])
            console.info(
                f"{target} already holds {request.name} at commit {revision[:12]}."
                + (f" The hub now has {newer[:12]}; remove the folder to download that commit." if newer else "")
            )
        _clear(workplace)
    return {"path": str(target), **record, "next": suggestion(target, record)}


@contextmanager
def _held(target: Path) -> Iterator[Path]:
    """The directory beside `target` where a download is gathered, held by this process alone."""
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
    """What to transfer: of the commits that a download which was stopped here began with, else of the newest."""
    asked = {"name": request.name, "limit": request.limit, "hub": hub.name}
    hub.commits = _begun(workplace, asked)
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
    selection = plan(replace(selection, column=column))
    if not resumed:
        _clear(workplace)
        with storage_errors(workplace):
            write_json(workplace / _BEGUN, {**asked, "commits": hub.commits})
    return selection


def _begun(workplace: Path, asked: dict[str, Any]) -> dict[str, str]:
    """The commits of the download that was stopped in `workplace`; none where there is none that can be read."""
    try:
        begun = read_json(workplace / _BEGUN, DataError)
        commits = {str(branch): str(commit) for branch, commit in begun.pop("commits").items()}
        name, limit, hub = begun["name"], begun["limit"], begun["hub"]
    except (DataError, KeyError, TypeError, AttributeError):
        return {}
    if begun != asked:
        raise DataError(
            f"{workplace} holds a stopped download of {name}, {extent(limit)}, from {hub}. Run that command again to "
            "resume it, or remove the folder."
        )
    return commits


def _announce(selection: Selection, hub: Hub, workplace: Path, console: Console) -> None:
    """Says what will be transferred; raises `StorageError` when the disk has no room for it."""
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
    """Brings every file that is taken below `directory`, where it has its name once it is whole."""
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
                    _bring(hub, selection.contents, file, part, progress)
                else:
                    if not take_excerpt(hub, selection.contents, file, part, file.limit):
                        part.unlink()
                        # After other files it may be that nothing of the last one fits.
                        if len(selection.taken) == 1:
                            raise DataError(
                                f"No whole row or line of {file.path} ({file.size:,} bytes) fits in the limit of "
                                f"{file.limit:,} bytes. Raise the limit, or leave it out."
                            )
                    progress.advance(file.limit / 1e6)
                if part.is_file():
                    part.rename(target)
                    sync_directory(target.parent)


def _bring(hub: Hub, contents: Contents, file: HubFile, part: Path, progress: Progress) -> None:
    """Makes `part` the whole file of the repository, going on with what an earlier transfer left there.

    Raises `DataError` when what comes is twice not the file that the hub lists.
    """
    for _ in range(2):
        hub.download(contents, file, part, progress)
        problem = _damage(part, file)
        if problem is None:
            return
        part.unlink()
        progress.advance(-file.size / 1e6)
    raise DataError(
        f"What {hub.name} sends for {file.path} of {contents.repository} is not the file that it lists: {problem}. "
        "This happened twice. Run the command again later, or ask the owner."
    )


def _damage(path: Path, file: HubFile) -> str | None:
    """How the bytes at `path` differ from `file`; None when size and hash are right."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    hasher = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as content:
        found = hashlib.file_digest(content, lambda: hasher).hexdigest()
    expected = file.sha256 or file.git_sha1
    return None if expected in (None, found) else f"its hash is {found} instead of {expected}"
