"""Maps each vocabulary entry to its bytes, as specified by the ``decoder`` of a ``tokenizer.json``.

The library's decoders turn a whole list of entries into text. Streaming and counting bytes need the bytes of each
entry alone; decoders treat only the first entry differently, by dropping leading spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.vocabulary import BYTE_TOKEN, characters_as_bytes

Step = Callable[[str], str | bytes]

# The replacements of a WordPiece decoder with `cleanup`, in this order.
_CLEANUP = (
    *((f" {sign}", sign) for sign in (".", "?", "!", ",")),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
)


@dataclass(frozen=True)
class Decoding:
    """Applies `steps` to an entry in turn until one returns bytes; `leading_spaces` as in `Tokenizer`."""

    steps: tuple[Step, ...]
    leading_spaces: int

    def entry(self, text: str) -> bytes:
        """The bytes of the vocabulary entry `text`."""
        return self._through(text, self.steps)

    def added(self, text: str) -> bytes:
        """The bytes of an added token, which is plain text and not in the characters that represent bytes."""
        return self._through(text, tuple(step for step in self.steps if step is not characters_as_bytes))

    @staticmethod
    def _through(text: str, steps: tuple[Step, ...]) -> bytes:
        value: str | bytes = text
        for step in steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return value if isinstance(value, bytes) else value.encode("utf-8")


def read_decoding(decoder: Mapping[str, Any] | None) -> Decoding:
    """Reads a ``decoder`` in the library's format; raises `TokenizerError` if it does not work entry by entry."""
    if decoder is None:
        return Decoding((lambda text: f" {text}",), 1)
    steps: list[Step] = []
    leading_spaces, joined = 0, False
    for part in _parts(decoder):
        kind = part["type"]
        if kind == "Fuse":
            joined = True
        elif kind == "Strip" and joined:
            if part["content"] != " " or part["stop"]:
                raise _unread(kind)
            leading_spaces += part["start"]
        elif kind in _STEPS and not joined:
            steps.append(_STEPS[kind](part))
            leading_spaces += kind == "WordPiece" or (kind == "Metaspace" and part["prepend_scheme"] != "never")
        else:
            raise _unread(kind)
    return Decoding(tuple(steps), leading_spaces)


def _parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _unread(kind: str) -> TokenizerError:
    return TokenizerError(
        f"{TOKENIZER_FILE} turns tokens into text with a decoder ({kind}) that does not work token by token, as "
        "SheepOp needs. Use a tokenizer of another kind."
    )


def _replace(part: Mapping[str, Any]) -> Step:
    if "String" in part["pattern"]:
        pattern, content = part["pattern"]["String"], part["content"]
        return lambda text: text.replace(pattern, content) if pattern else text
    from tokenizers import Regex, decoders

    replace = decoders.Replace(Regex(part["pattern"]["Regex"]), part["content"])
    return lambda text: str(replace.decode([text]))


def _strip(part: Mapping[str, Any]) -> Step:
    def strip(text: str) -> str:
        content, start, stop = part["content"], part["start"], part["stop"]
        first = min(start, len(text) - len(text.lstrip(content)))
        last = len(text) - min(stop, len(text) - len(text.rstrip(content)))
        return text[first : max(first, last)]

    return strip


def _word_piece(part: Mapping[str, Any]) -> Step:
    prefix, cleanup = part["prefix"], part["cleanup"]

    def word_piece(text: str) -> str:
        text = text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"
        for before, after in _CLEANUP if cleanup else ():
            text = text.replace(before, after)
        return text

    return word_piece


def _byte_fallback(text: str) -> str | bytes:
    found = BYTE_TOKEN.fullmatch(text)
    return bytes((int(found[1], 16),)) if found else text


_STEPS: dict[str, Callable[[Mapping[str, Any]], Step]] = {
    "ByteFallback": lambda part: _byte_fallback,
    "ByteLevel": lambda part: characters_as_bytes,
    "Metaspace": lambda part: lambda text: text.replace(part["replacement"], " "),
    "Replace": _replace,
    "Strip": _strip,
    "WordPiece": _word_piece,
}
