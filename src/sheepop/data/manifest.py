"""Reads ``manifest.json``, which describes a corpus directory and gives its format version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.files import read_json

MANIFEST = "manifest.json"
CORPUS_FORMAT = "sheepop corpus"
FORMAT_VERSION = 3
_BEGINNING = re.compile(rf'\s*\{{\s*"format":\s*"{CORPUS_FORMAT}"')


def is_corpus(path: str | Path) -> bool:
    """Whether `path` is a directory with the manifest of a corpus; reads only its first bytes."""
    manifest = Path(path) / MANIFEST
    try:
        if not manifest.is_file():
            return False
        with manifest.open("rb") as file:
            beginning = file.read(256).decode("utf-8", "replace")
    except OSError:
        return False
    return _BEGINNING.match(beginning) is not None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads the manifest of a corpus; raises `DataError` if it is missing, damaged, or written by a newer SheepOp."""
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{directory} is not a corpus directory: it has no {MANIFEST}. Make one with 'sheepop data build', or give "
            "the folder with the text itself."
        )
    manifest = read_json(path, DataError)
    if not isinstance(manifest, dict) or manifest.get("format") != CORPUS_FORMAT:
        raise DataError(f"{path} is not the manifest of a SheepOp corpus. Give a directory that SheepOp built.")
    version = manifest.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DataError(f"{path} is damaged: format_version is {version!r}. Build the corpus again.")
    if version > FORMAT_VERSION:
        raise DataError(
            f"{directory} has corpus format {version}, but this SheepOp reads formats up to {FORMAT_VERSION}. "
            "Upgrade SheepOp, or build the corpus again with this version."
        )
    return manifest
