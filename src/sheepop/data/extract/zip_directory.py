"""The names in a zip file's directory, read within small bounds: enough to tell an office file from an archive."""

from __future__ import annotations

import struct
from typing import BinaryIO

_END = struct.Struct("<4s4H2IH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_LONGEST_COMMENT = 2**16
_DIRECTORY_BYTES = 2**20


def directory_names(file: BinaryIO) -> list[str]:
    """The first few thousand member names of the zip in `file`, fewer or none when its directory is damaged."""
    size = file.seek(0, 2)
    tail_size = min(size, _LONGEST_COMMENT + _END.size)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    position = tail.rfind(b"PK\x05\x06")
    if position < 0 or position + _END.size > len(tail):
        return []
    length = _END.unpack_from(tail, position)[5]
    # The directory ends where this record begins, also when a program that unpacks stands before the archive.
    file.seek(max(0, size - tail_size + position - length))
    return _names(file.read(min(length, _DIRECTORY_BYTES)))


def first_member(head: bytes) -> tuple[str, bytes]:
    """Name and content of the first member as far as `head`, the beginning of the file, shows them uncompressed."""
    if len(head) < _LOCAL.size:
        return "", b""
    _, _, _, method, _, _, _, size, _, name_length, extra_length = _LOCAL.unpack_from(head)
    begin = _LOCAL.size + name_length + extra_length
    name = head[_LOCAL.size : _LOCAL.size + name_length].decode("utf-8", "replace")
    return name, head[begin : begin + size] if method == 0 else b""


def _names(directory: bytes) -> list[str]:
    names, position = [], 0
    while directory.startswith(b"PK\x01\x02", position) and position + _ENTRY.size <= len(directory):
        fields = _ENTRY.unpack_from(directory, position)
        name_length, extra_length, comment_length = fields[10:13]
        begin = position + _ENTRY.size
        names.append(directory[begin : begin + name_length].decode("utf-8", "replace"))
        position = begin + name_length + extra_length + comment_length
    return names
