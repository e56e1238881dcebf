"""Makes compound files, the containers of old office formats ([MS-CFB]), of the streams that a test gives."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

SECTOR, MINI_SECTOR, CUTOFF, ENTRY = 512, 64, 4096, 128
FREE, END, TABLE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD


def compound(tree: Mapping[str, Any]) -> bytes:
    """A compound file of version 3 with these streams (bytes) and storages (nested mappings)."""
    small, chains = bytearray(), list[int]()
    sectors, fat = list[bytes](), list[int]()

    def stored(data: bytes) -> int:
        """Appends data in sectors that follow each other, and returns the first of them."""
        begin, count = len(sectors), -(-len(data) // SECTOR)
        sectors.extend(data[at : at + SECTOR].ljust(SECTOR, b"\0") for at in range(0, len(data), SECTOR))
        fat.extend([*range(begin + 1, begin + count), END] if count else [])
        return begin if count else END

    def stored_small(data: bytes) -> int:
        begin, count = len(chains), -(-len(data) // MINI_SECTOR)
        small.extend(data.ljust(count * MINI_SECTOR, b"\0"))
        chains.extend([*range(begin + 1, begin + count), END] if count else [])
        return begin if count else END

    entries = [b""]

    def add(tree: Mapping[str, Any]) -> int:
        """Adds the entries of a storage, each with the next one on its right, and returns the first of them."""
        following = FREE
        for name, content in sorted(tree.items(), key=lambda item: (len(item[0]), item[0].upper()), reverse=True):
            if isinstance(content, bytes):
                place = stored(content) if len(content) >= CUTOFF else stored_small(content)
                entries.append(entry(name, 2, following, FREE, place, len(content)))
            else:
                child = add(content)
                entries.append(entry(name, 1, following, child, 0, 0))
            following = len(entries) - 1
        return following

    def entry(name: str, kind: int, right: int, child: int, begin: int, size: int) -> bytes:
        spelt = f"{name}\0".encode("utf-16-le")
        head = spelt.ljust(64, b"\0") + struct.pack("<HBBIII", len(spelt), kind, 1, FREE, right, child)
        return head + bytes(36) + struct.pack("<IQ", begin, size)

    child = add(tree)
    entries[0] = entry("Root Entry", 5, FREE, child, stored(bytes(small)), len(small))
    mini_begin = stored(struct.pack(f"<{len(chains)}I", *chains).ljust(-(-len(chains) // 128) * SECTOR, b"\xff"))
    mini_count = -(-len(chains) // 128)
    directory = stored(b"".join(entries))
    count = 1
    while count * 128 < len(sectors) + count:
        count += 1
    begin = len(sectors)
    fat += [TABLE] * count
    table = struct.pack(f"<{len(fat)}I", *fat).ljust(count * SECTOR, b"\xff")
    head = bytes.fromhex("d0cf11e0a1b11ae1") + bytes(16) + struct.pack("<HHHHH", 0x3E, 3, 0xFFFE, 9, 6) + bytes(6)
    head += struct.pack("<IIIIIIIIII", 0, count, directory, 0, CUTOFF, mini_begin, mini_count, END, 0, begin)
    head += b"".join(struct.pack("<I", begin + at) for at in range(1, count))
    return head.ljust(SECTOR, b"\xff") + b"".join(sectors) + table
