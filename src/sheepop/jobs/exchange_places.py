"""What stands where a model is to be read or written, so that nothing else is ever replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sheepop.checkpoint.model_directory import FORMAT
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import CHECKSUMS, read_json

_CONFIG = "config.json"
_GGUF_MAGIC = b"GGUF"


def require_free(output: Path, overwrite: bool, what: str, may_go: Callable[[Path], bool]) -> None:
    """Raises `UsageError` for an output in use: always when it holds something else than `what`, which `may_go` tells,
    and without `overwrite` for anything."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not may_go(output):
        raise UsageError(f"{output} is there already and is not {what}. Choose another place.")
    if not overwrite:
        raise UsageError(f"{output} holds {what} already. Choose another place, or give --overwrite.")


def require_apart(source: Path, output: Path) -> None:
    """Raises `UsageError` for an output that is the source, lies in it or holds it: neither may change the other."""
    here, there = source.resolve(), output.resolve()
    if source.is_dir() and (here == there or here in there.parents):
        raise UsageError(f"{output} lies in {source}, which is left as it is. Choose a place outside of it.")
    if there in here.parents:
        raise UsageError(f"{output} holds {source}, which is left as it is. Choose another place.")


def is_model(directory: Path) -> bool:
    """Whether a directory is a model of ours."""
    config = directory / _CONFIG
    try:
        found = read_json(config) if config.is_file() else None
    except CheckpointError:
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def is_export(directory: Path) -> bool:
    """Whether a directory is one that an export wrote: a model of another program with our checksums."""
    return (directory / CHECKSUMS).is_file() and (directory / _CONFIG).is_file() and not is_model(directory)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
