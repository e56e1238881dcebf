"""One dataset from the hub to a folder: planned, checked against the disk, transferred, recorded, and renamed last."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.core.console import Console, Progress
from sheepop.core.errors import DataError, StorageError
from sheepop.core.facts import counted
from sheepop.core.files import remove_tree, storage_errors
from sheepop.data.download.catalog import Request, find
from sheepop.data.download.columns import text_column
from sheepop.data.download.excerpt import take_excerpt
from sheepop.data.download.hub import CONVERTED, Hub
from sheepop.data.download.plan import Plan, PlannedFile, make_plan
from sheepop.data.download.record import extent, publish, read_finished, suggestion
from sheepop.data.download.selection import select
from sheepop.data.download.transfer import PART_SUFFIX, transfer
from sheepop.report.formatting import data_size

_FILES, _LOCK = "files", "lock"
# Left free on the disk whatever is downloaded.
_MARGIN = 2**24


def download_dataset(
    name: str, output: Path, *, limit: int | None = None, token: str | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Downloads what `name` asks for (see `catalog`) to a folder below `output`; returns its record and its `path`.

    With `limit` at most so many bytes are transferred. The folder appears whole when everything has come; until then
    what has come is kept beside it, and the same call goes on with it. A folder that holds this download already is
    left as it is. Raises `UsageError` for a name that means nothing, `DataError` for what the hub refuses or does not
    have, `StorageError` when there is no room.
    """
    console = console or Console.silent()
    request = find(name)
    target = output / request.folder
    hub = Hub(token)
    with _held(target) as workplace:
        record = read_finished(target, request, limit)
        if record is None:
            plan = _plan(hub, request, limit, workplace, console)
            _announce(plan, workplace, console)
            _transfer(hub, plan, workplace / _FILES, console)
            record = publish(plan, workplace / _FILES, target)
        else:
            _say_newer(hub, request, record, target, console)
        _clear(workplace)
    return {"path": str(target), **record, "next": suggestion(target, record)}


@contextmanager
def _held(target: Path) -> Iterator[Path]:
    """The directory beside `target` where a download is gathered, held by this process alone."""
    workplace = target.with_name(f".{target.name}.downloading")
    with storage_errors(target):
        workplace.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(workplace / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DataError(f"Another process is downloading {target} right now. Wait for it to finish.") from None
    try:
        yield workplace
    finally:
        if workplace.is_dir() and [entry.name for entry in workplace.iterdir()] == [_LOCK]:
            remove_tree(workplace)
        os.close(descriptor)


def _say_newer(hub: Hub, request: Request, record: dict[str, Any], target: Path, console: Console) -> None:
    """Says that the download is there, and whether the hub has another version by now; it need not be reachable."""
    revision = record["revision"]
    try:
        newest = hub.contents(record["repository"], CONVERTED if record["converted"] else None)
    except DataError:
        newest = None
    message = f"{target} already holds {request.name} at commit {revision[:12]}."
    if newest is not None and newest.revision != revision:
        message += f" The hub now has {newest.revision[:12]}; remove the folder to download that commit."
    console.info(message)


def _plan(hub: Hub, request: Request, limit: int | None, workplace: Path, console: Console) -> Plan:
    """The plan of the download that was stopped here, else a new one of the newest commit."""
    plan = Plan.read(workplace)
    if plan is None:
        _clear(workplace)
        selection = select(hub, request)
        column, names = text_column(hub, selection, request.column)
        if column is None and names:
            console.warn(
                f"SheepOp cannot tell which column is the text. {request.name} has {', '.join(names)}: set "
                "data.extract.column or data.extract.template when you build with it."
            )
        plan = make_plan(request, selection, hub.name, column, limit, hub.fetched)
        plan.write(workplace)
        return plan
    if (plan.name, plan.limit, plan.endpoint) != (request.name, limit, hub.name):
        raise DataError(
            f"{workplace} holds a stopped download of {plan.name}, {extent(plan.limit)}, from {plan.endpoint}. Run "
            "that command again to resume it, or remove the folder."
        )
    newest = hub.contents(plan.repository, CONVERTED if plan.converted else None)
    if newest is not None and newest.revision != plan.revision:
        console.warn(
            f"{plan.repository} has changed since this download began. It continues with the commit it began with, "
            f"{plan.revision[:12]}; remove {workplace} to start again with {newest.revision[:12]}."
        )
    return plan


def _clear(workplace: Path) -> None:
    for entry in workplace.iterdir():
        if entry.name != _LOCK:
            remove_tree(entry)


def _announce(plan: Plan, workplace: Path, console: Console) -> None:
    """Says what will be transferred; raises `StorageError` when the disk has no room for it."""
    there = sum(path.stat().st_size for path in workplace.rglob("*") if path.is_file())
    left = max(0, plan.transfer - there)
    free = shutil.disk_usage(workplace).free
    of_all = "" if plan.limit is None else f" of {data_size(plan.listed_bytes)} in {counted(plan.listed_files, 'file')}"
    branch = f", branch {CONVERTED}" if plan.converted else ""
    console.info(
        f"{plan.name} is {plan.repository} on {plan.endpoint}, commit {plan.revision[:12]}{branch}: "
        f"{counted(len(plan.files), 'file')}, {data_size(plan.transfer)}{of_all}"
        f"{f', of which {data_size(left)} is still to come' if there > 2**12 else ''}; {data_size(free)} is free. "
        f"Licence: {plan.licence or 'not stated by its publisher'}.{f' {plan.note}' if plan.note else ''}"
    )
    if left + _MARGIN > free:
        raise StorageError(
            f"{plan.name} needs {data_size(left)} more on {workplace.parent}, where {data_size(free)} is free. Free "
            "some space, choose another output directory, or set a limit to download only the beginning."
        )


def _transfer(hub: Hub, plan: Plan, directory: Path, console: Console) -> None:
    """Brings every file of the plan below `directory`."""
    with console.progress(f"Downloading {plan.name}", plan.transfer / 1e6, "MB") as progress:
        for planned in plan.files:
            progress.describe(planned.target)
            target = directory / planned.target
            if planned.limit is None:
                transfer(hub, plan.contents, planned.file, target, progress)
            else:
                _excerpt(hub, plan, planned, target, progress)


def _excerpt(hub: Hub, plan: Plan, planned: PlannedFile, target: Path, progress: Progress) -> None:
    """Brings the beginning of the last file; after others it may also be that nothing of it fits."""
    assert planned.limit is not None
    if not target.is_file():
        part = target.with_name(target.name + PART_SUFFIX)
        if take_excerpt(hub, plan.contents, planned.file, part, planned.limit):
            part.rename(target)
        else:
            part.unlink(missing_ok=True)
            if len(plan.files) == 1:
                raise DataError(
                    f"No whole row or line of {planned.file.path} ({planned.file.size:,} bytes) fits in the limit "
                    f"of {plan.limit:,} bytes. Raise the limit, or leave it out."
                )
    progress.advance(planned.limit / 1e6)
