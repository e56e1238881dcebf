"""What a finished download says of itself: ``download.json`` beside its files, and how to build a corpus of them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.files import read_json, sha256_file, storage_errors, sync_tree, write_atomic, write_json
from sheepop.data.download.catalog import Request
from sheepop.data.download.plan import RECORD, Plan, PlannedFile

_FORMAT_VERSION = 1
_IGNORE = ".sheepopignore"


def read_finished(target: Path, request: Request, limit: int | None) -> dict[str, Any] | None:
    """The record of a download that is there already; raises `DataError` when something else is."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / RECORD).is_file():
        raise DataError(f"{target} already exists and is not a download. Choose another output directory.")
    record = read_json(target / RECORD, DataError)
    try:
        if record["format_version"] != _FORMAT_VERSION:
            raise DataError(
                f"{target / RECORD} was written by another version of SheepOp. Remove {target} to download it again."
            )
        if (record["name"], record["limit"]) != (request.name, limit):
            raise DataError(
                f"{target} holds {record['name']}, downloaded {extent(record['limit'])}, but you asked for "
                f"{request.name}, {extent(limit)}. Remove it, or choose another output directory."
            )
        for file in record["files"]:
            path = target / file["file"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                raise DataError(f"{path} is missing or damaged. Remove {target} to download it again.")
    except (KeyError, TypeError):
        raise DataError(f"{target / RECORD} is damaged. Remove {target} to download it again.") from None
    finished: dict[str, Any] = record
    return finished


def extent(limit: int | None) -> str:
    """How much was asked for, in words."""
    return "whole" if limit is None else f"with a limit of {limit:,} bytes"


def publish(plan: Plan, hub: str, directory: Path, target: Path) -> dict[str, Any]:
    """Records the download from `hub` beside its files in `directory`, and renames that folder to `target`."""
    there = [planned for planned in plan.files if (directory / planned.target).is_file()]
    files = [_file_record(planned, directory / planned.target) for planned in there]
    selection = plan.selection
    record = {
        "format_version": _FORMAT_VERSION,
        "name": plan.request.name,
        "hub": hub,
        "repository": selection.contents.repository,
        "revision": selection.contents.revision,
        "converted": selection.converted,
        "subset": selection.subset,
        "split": plan.request.split,
        "column": plan.column,
        "licence": plan.licence,
        "note": plan.request.note,
        "limit": plan.limit,
        "complete": len(files) == len(selection.files) and all(file["whole"] for file in files),
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
    }
    with storage_errors(target):
        write_json(directory / RECORD, record)
        # The record is no text to build a corpus of.
        write_atomic(directory / _IGNORE, f"/{RECORD}\n")
        sync_tree(directory)
        if target.is_dir():
            target.rmdir()
        directory.rename(target)
    return record


def _file_record(planned: PlannedFile, path: Path) -> dict[str, Any]:
    whole = planned.limit is None
    return {
        "file": planned.target,
        "split": planned.split,
        "bytes": path.stat().st_size,
        "sha256": planned.file.sha256 if whole and planned.file.sha256 else sha256_file(path),
        "origin": planned.file.path,
        "whole": whole,
    }


def suggestion(target: Path, record: dict[str, Any]) -> str:
    """The command that builds a corpus of a download: of its training files, where it has others too."""
    files = [file["file"] for file in record["files"] if file["split"] == "train"]
    others = [file["file"] for file in record["files"] if file["split"] != "train"]
    paths = shlex.quote(str(target))
    if files and others:
        prefix = os.path.commonprefix(files)  # noqa: RUF071 - of characters
        whole = len(files) == 1
        if whole or not any(other.startswith(prefix) for other in others):
            paths = shlex.quote(str(target / prefix)) + ("" if whole else "*")
        else:
            paths = " ".join(shlex.quote(str(target / file)) for file in files)
    column = record["column"]
    setting = f" {shlex.quote(f'data.extract.column={column}')}" if column is not None else ""
    return f"sheepop data build {paths} --output {shlex.quote(f'corpora/{target.name}')}{setting}"
