"""Special tokens that the texts of a conversation spell: they stay text, so that nobody can end a message inside it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sheepop.tokenizer.interface import Tokenizer


class SpelledTokens:
    """Encodes rendered conversations; the special tokens in `values`, what a template gets, are text there.

    The template must get `hidden` of these values, in which a name stands for each such text.
    """

    def __init__(self, tokenizer: Tokenizer, values: Any) -> None:
        self._tokenizer, self._special = tokenizer, [token for token in tokenizer.special_tokens if token]
        found = {token for text in _texts(values) for token in self._special if token in text}
        self._spelled = sorted(found, key=len, reverse=True)
        self._mark = f"q{secrets.token_hex(8)}z"  # of which no beginning is an end

    def hidden(self, value: Any) -> Any:
        """A value of JSON with a name for each special token that it spells."""
        names = {token: f"{self._mark}{number}{self._mark}" for number, token in enumerate(self._spelled)}
        return _replaced(value, names) if names else value

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text, special tokens of the template included."""
        special, ids, plain = self._special, list[int](), ""
        parts = text.split(self._mark)
        for place, part in enumerate(parts):
            if place % 2:
                plain += self._spelled[int(part)]
                continue
            # Around a name, all is text up to the special tokens before and after.
            first = min((found for token in special if (found := part.find(token)) >= 0), default=len(part))
            end = max((found + len(token) for token in special if (found := part.rfind(token)) >= 0), default=0)
            begin, end = (first if place else 0), (end if place + 1 < len(parts) else len(part))
            if begin >= end:
                plain += part
                continue
            ids += self._tokenizer.encode(plain + part[:begin]) if plain or begin else []
            ids += self._tokenizer.encode(part[begin:end], allow_special=True)
            plain = part[end:]
        return ids + (self._tokenizer.encode(plain) if plain else [])


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(key)
            yield from _texts(entry)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _texts(entry)


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """A value of JSON with the texts `names` replaced, in order."""
    if isinstance(value, str):
        for text, name in names.items():
            value = value.replace(text, name)
        return value
    if isinstance(value, Mapping):
        return {_replaced(key, names): _replaced(entry, names) for key, entry in value.items()}
    return [_replaced(entry, names) for entry in value] if isinstance(value, Sequence) else value
