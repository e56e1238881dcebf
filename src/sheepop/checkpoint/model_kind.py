"""What a path holds: a model of SheepOp, a directory in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json

FORMAT = "sheepop-model"
GGUF = ".gguf"
_GGUF_MAGIC = b"GGUF"


def is_model(directory: Path) -> bool:
    """Whether a directory is a SheepOp model."""
    return _config(directory).get("format") == FORMAT


def is_hugging_face(directory: Path) -> bool:
    """Whether a directory is a model in Hugging Face's format, of any family."""
    return "model_type" in _config(directory) and not is_model(directory)


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the magic number of GGUF."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; empty if there is no such file, or no table in it."""
    try:
        found = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else None
    except CheckpointError:
        return {}
    return found if isinstance(found, dict) else {}
