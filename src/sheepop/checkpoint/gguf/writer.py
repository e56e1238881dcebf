"""The GGUF container, written: version 3, little endian, one tensor after the other as they come."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from sheepop.checkpoint.gguf.checksum import CHECKSUM_KEY
from sheepop.checkpoint.gguf.container import ALIGNMENT, DIGEST_SIZE, LONGEST_NAME, MAGIC, VERSION
from sheepop.checkpoint.gguf.tensor_types import TensorType
from sheepop.checkpoint.gguf.values import Value, encoded_text


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: its name, its type, and its shape in the order of torch."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes in the file, without the padding behind them."""
        size = self.kind.size(self.shape)
        assert size is not None
        return size


def write_container(
    path: Path,
    metadata: Mapping[str, Value],
    plans: Sequence[TensorPlan],
    content_of: Callable[[TensorPlan], Iterable[Tensor]],
) -> None:
    """Writes a file whose tensors are the bytes (uint8) that `content_of` gives, in pieces and in order.

    The last key is the checksum's, which is filled in at the end. The caller makes the file durable.
    """
    head = _head(metadata, plans)
    checksum_end = _end_of_metadata(metadata)
    with path.open("wb") as file:
        digest = hashlib.sha256()
        _put(file, digest, head)
        for plan in plans:
            written = 0
            for piece in content_of(plan):
                content = piece.contiguous().numpy().tobytes()
                _put(file, digest, content)
                written += len(content)
            assert written == plan.size, plan.name
            _put(file, digest, bytes(-written % ALIGNMENT))
        file.seek(checksum_end - DIGEST_SIZE)
        file.write(digest.hexdigest().encode("ascii"))


def _head(metadata: Mapping[str, Value], plans: Sequence[TensorPlan]) -> bytes:
    parts = [_metadata_bytes(metadata, len(plans))]
    place = 0
    for plan in plans:
        assert len(plan.name.encode("utf-8")) <= LONGEST_NAME, plan.name
        sizes = tuple(reversed(plan.shape))
        parts.append(encoded_text(plan.name))
        parts.append(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, plan.kind.number, place))
        place += plan.size + -plan.size % ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % ALIGNMENT)


def _metadata_bytes(metadata: Mapping[str, Value], num_tensors: int) -> bytes:
    assert list(metadata)[-1] == CHECKSUM_KEY
    counts = struct.pack("<IQQ", VERSION, num_tensors, len(metadata))
    return MAGIC + counts + b"".join(encoded_text(key) + value.encoded() for key, value in metadata.items())


def _end_of_metadata(metadata: Mapping[str, Value]) -> int:
    return len(_metadata_bytes(metadata, 0))


def _put(file: BinaryIO, digest: hashlib._Hash, content: bytes) -> None:
    file.write(content)
    digest.update(content)
