"""A file on the hub read here and there, as Parquet is read: only the blocks that are touched are transferred."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_KEPT_BYTES = 2**26
_LONGEST_REQUEST = 2**24


class LimitReached(Exception):  # noqa: N818 - it ends a transfer as it was asked to
    """The next read would transfer more than was allowed."""


class RemoteFile(io.RawIOBase):
    """A readable, seekable file of `size` bytes, of which ``fetch(start, stop)`` gives any part.

    It comes in blocks of `block` bytes, of which about 64 MiB are kept. `transferred` counts what came; a read that
    would make it more than `limit` raises `LimitReached`.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], size: int, *, block: int = 2**14, limit: int | None = None
    ) -> None:
        super().__init__()
        self._fetch, self._size, self.block, self._limit = fetch, size, block, limit
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._position = 0
        self.transferred = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """Any place of it can be read next."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position; raises ValueError for one before the file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills `buffer` from the position on, with less only at the end of the file."""
        view = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._position + len(view), self._size)
        if stop <= start:
            return 0
        for number in range(start // self.block, -(-stop // self.block)):
            block = self._blocks.get(number) or self._load(number, -(-stop // self.block))
            at = number * self.block
            piece = block[max(start - at, 0) : stop - at]
            offset = max(at, start) - start
            view[offset : offset + len(piece)] = piece
        self._position = stop
        return stop - start

    def _load(self, number: int, end: int) -> bytes:
        """Fetches block `number`, and those after it that are missing and needed before block `end`."""
        last, most = number + 1, number + max(1, _LONGEST_REQUEST // self.block)
        while last < min(end, most) and last not in self._blocks:
            last += 1
        start, stop = number * self.block, min(last * self.block, self._size)
        if self._limit is not None and self.transferred + stop - start > self._limit:
            raise LimitReached
        data = self._fetch(start, stop)
        self.transferred += len(data)
        for index in range(number, last):
            self._blocks[index] = data[(index - number) * self.block : (index - number + 1) * self.block]
        block = self._blocks[number]
        while len(self._blocks) * self.block > _KEPT_BYTES + _LONGEST_REQUEST:
            self._blocks.popitem(last=False)
        return block
