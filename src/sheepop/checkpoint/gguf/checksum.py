"""The checksum that SheepOp puts into the GGUF files it writes; the format itself has none.

It is SHA-256 of the whole file with zeros where the checksum will stand. A program that stores the same model in
another type (``llama-quantize``) copies the metadata it does not know, so the type of the file stands beside the sum.
"""

from __future__ import annotations

import re

from sheepop.checkpoint.gguf.container import DIGEST_SIZE, Container
from sheepop.checkpoint.gguf.values import Value, text
from sheepop.core.errors import CheckpointError

CHECKSUM_KEY = "sheepop.checksum"
FILE_TYPE_KEY = "general.file_type"
_FORM = re.compile(r"file type (\d+), SHA-256 ([0-9a-f]{64})")


def checksum_placeholder(file_type: int) -> Value:
    """What stands in a file until its checksum is known."""
    return text(f"file type {file_type}, SHA-256 {'0' * DIGEST_SIZE}")


def verify_checksum(container: Container) -> None:
    """Raises `CheckpointError` when a file that SheepOp wrote, and nobody stored in another type, has changed."""
    value = container.metadata.get(CHECKSUM_KEY)
    if value is None:
        return
    match = _FORM.fullmatch(value.content) if isinstance(value.content, str) else None
    if match is None:
        raise CheckpointError(f"{container.path} is damaged: its checksum is not one. Export the model anew.")
    file_type = container.metadata.get(FILE_TYPE_KEY)
    if file_type is not None and file_type.content != int(match[1]):
        return
    if container.digest(CHECKSUM_KEY) != match[2]:
        raise CheckpointError(
            f"{container.path} is damaged, or another program changed it since SheepOp wrote it: its checksum differs. "
            f"Export the model anew, or remove the key {CHECKSUM_KEY} from its metadata if the change was intended."
        )
