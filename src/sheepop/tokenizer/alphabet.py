"""The printable characters that represent the 256 bytes in a byte-level vocabulary (Radford et al. 2019)."""

from __future__ import annotations

import re


def _byte_alphabet() -> dict[str, int]:
    """Maps characters to bytes: printable bytes are represented by themselves, others by U+0100 and following."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_ALPHABET.items()}

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens for single bytes in vocabularies of characters, used for characters that they lack."""


def bytes_as_characters(data: bytes) -> str:
    """The characters that represent `data` in a byte-level vocabulary."""
    return data.decode("latin-1").translate(_CHARACTER_OF_BYTE)


def text_as_characters(text: str) -> str:
    """The characters that represent the UTF-8 bytes of `text` in a byte-level vocabulary."""
    return bytes_as_characters(text.encode("utf-8"))


def characters_as_bytes(text: str) -> bytes:
    """The bytes that an entry of a byte-level vocabulary represents.

    An entry with other characters represents its own text, as in the `tokenizers` library.
    """
    try:
        return bytes(BYTE_ALPHABET[character] for character in text)
    except KeyError:
        return text.encode("utf-8")
