"""What a path holds: a model of SheepOp, a directory in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json

FORMAT = "sheepop-model"
# The files of an adapter in the format of Hugging Face's PEFT.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GGUF = ".gguf"
_GGUF_MAGIC = b"GGUF"
_PART_OF_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)


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


def gguf_parts(path: str) -> list[str]:
    """Returns the paths of all files of a GGUF model, given one: several for a name like NAME-00001-of-00003.gguf."""
    match = _PART_OF_GGUF.fullmatch(path)
    if match is None:
        return [path]
    return [f"{match[1]}-{number:05}-of-{match[2]}{GGUF}" for number in range(1, int(match[2]) + 1)]


def _config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; empty if there is no such file, or no table in it."""
    try:
        found = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else None
    except CheckpointError:
        return {}
    return found if isinstance(found, dict) else {}
