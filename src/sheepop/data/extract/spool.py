"""Members of containers while they are read: counted against what the container may hold, in memory or on disk."""

from __future__ import annotations

import errno
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Protocol

from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, ExtractionError

LEAST_EXPANSION_BYTES = 2**26
"""What the content of a container may always come to, however small the container is."""

_BLOCK = 2**20
_MEMORY_BYTES = 2**24


_FULL = (errno.ENOSPC, errno.EDQUOT)


class Readable(Protocol):
    """What can be read forward."""

    def read(self, count: int, /) -> bytes:
        """At most `count` bytes, none at the end."""


class MemberError(ExtractionError):
    """One member of a container cannot be used; those after it may."""


def expansion_limit(size: int, config: ExtractConfig) -> int:
    """To how many bytes the content of `size` bytes may come, unpacked from its containers or as text."""
    return max(int(config.max_expansion * size), LEAST_EXPANSION_BYTES)


class Allowance:
    """How many bytes may still come out of a container of `size` bytes."""

    def __init__(self, size: int, config: ExtractConfig) -> None:
        self._limit = self._left = expansion_limit(size, config)

    def spend(self, num_bytes: int) -> None:
        """Takes `num_bytes` off; raises `ExtractionError` with reason ``bomb`` when they are not left."""
        self._left -= num_bytes
        if self._left < 0:
            raise ExtractionError("bomb", f"it unpacks to over {self._limit:,} bytes; see data.extract.max_expansion")


class Counted:
    """A stream whose bytes are taken off an allowance as they are read."""

    def __init__(self, source: Readable, allowance: Allowance) -> None:
        self._source, self._allowance = source, allowance

    def read(self, count: int = -1, /) -> bytes:
        """At most `count` bytes, none at the end."""
        data = self._source.read(count)
        self._allowance.spend(len(data))
        return data


def raise_if_full(error: Exception, scratch: Path) -> None:
    """Raises `StorageError`, which ends the build, when `error` says that there is no room for temporary files."""
    if isinstance(error, OSError) and error.errno in _FULL:
        raise StorageError(
            f"There is no room for temporary files in {scratch}: {error.strerror}. Free some space there."
        ) from None


@contextmanager
def spooled(source: Readable, name: str, limit: int, scratch: Path) -> Iterator[Content]:
    """All of `source` as content called `name`: in memory, or in a temporary file when it is large.

    Raises `MemberError` when it is longer than `limit` bytes or cannot be unpacked.
    """
    blocks, beginning = _blocks(source, limit), bytearray()
    for block in blocks:
        beginning += block
        if len(beginning) > _MEMORY_BYTES:
            break
    else:
        yield Content(name, data=bytes(beginning))
        return
    with NamedTemporaryFile(dir=scratch) as file:
        file.write(beginning)
        beginning.clear()
        for block in blocks:
            file.write(block)
        file.flush()
        yield Content(name, path=Path(file.name))


def _blocks(source: Readable, limit: int) -> Iterator[bytes]:
    total = 0
    while block := _block(source):
        total += len(block)
        if total > limit:
            raise MemberError("oversized", f"over data.extract.max_member_bytes = {limit:,}")
        yield block


def _block(source: Readable) -> bytes:
    try:
        return source.read(_BLOCK)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise MemberError("damaged", f"it cannot be unpacked: {error}") from None
    except OSError as error:
        if error.errno is None:
            raise MemberError("damaged", f"it cannot be unpacked: {error}") from None
        raise
