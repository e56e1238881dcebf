"""The metadata of a file, handed out one by one under the name of its architecture, so that none is left unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from sheepop.checkpoint.gguf.values import Value, ValueType, shortest_decimal
from sheepop.core.errors import CheckpointError

T = TypeVar("T")

# Far above every published model, and far below what would overflow a product of two sizes.
_LARGEST_NUMBER = 2**31
_WHOLE = frozenset(
    {
        ValueType.U8,
        ValueType.I8,
        ValueType.U16,
        ValueType.I16,
        ValueType.U32,
        ValueType.I32,
        ValueType.U64,
        ValueType.I64,
    }
)
_REAL = frozenset({ValueType.F32, ValueType.F64})


class Keys:
    """`metadata` below ``prefix.``; every key that is taken counts as read. Errors name `path` and the key."""

    def __init__(self, metadata: Mapping[str, Value], prefix: str, path: Path) -> None:
        self._metadata, self._prefix, self._path = metadata, f"{prefix}.", path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self._prefix + key in self._metadata

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on; one for each layer counts when all are equal."""
        value = self._take(key)
        if value is None:
            return self._default(key, default)
        if isinstance(value.content, np.ndarray) and value.type in _WHOLE:
            numbers = set(value.content.tolist())
            if len(numbers) != 1:
                raise self.problem(key, "differs from layer to layer, which SheepOp's network has not")
            number = numbers.pop()
        else:
            number = value.content
        if value.type not in _WHOLE or not isinstance(number, int) or not 0 <= number < _LARGEST_NUMBER:
            raise self.problem(key, "is not a whole number of a reasonable size")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as the decimal with the fewest digits that gives it in single precision."""
        value = self._take(key)
        if value is None:
            return self._default(key, default)
        if value.type not in _REAL or not isinstance(value.content, float) or not math.isfinite(value.content):
            raise self.problem(key, "is not a finite number")
        return shortest_decimal(value.content) if value.type is ValueType.F32 else value.content

    def truth(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._take(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value.content, bool):
            raise self.problem(key, "is not true or false")
        return value.content

    def text(self, key: str, default: str | None = None) -> str:
        """Text."""
        value = self._take(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value.content, str):
            raise self.problem(key, "is not text")
        return value.content

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers, or of truth values as 0 and 1."""
        value = self._take(key)
        if value is None or not isinstance(value.content, np.ndarray) or value.type in _REAL:
            raise self.problem(key, "is not a list of whole numbers")
        return [int(number) for number in value.content.tolist()]

    def reals(self, key: str) -> list[float]:
        """A list of finite numbers."""
        value = self._take(key)
        if value is None or not isinstance(value.content, np.ndarray) or value.type not in _REAL:
            raise self.problem(key, "is missing" if value is None else "is not a list of numbers")
        if not bool(np.isfinite(value.content.astype(np.float64)).all()):
            raise self.problem(key, "has entries that are not finite")
        return [float(number) for number in value.content.tolist()]

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self._take(key)
        if value is None or not isinstance(value.content, list):
            raise self.problem(key, "is missing" if value is None else "is not a list of texts")
        return value.content

    def is_list(self, key: str) -> bool:
        """Whether the key is there and a list."""
        return self.has(key) and self._metadata[self._prefix + key].is_list

    def unread(self) -> list[str]:
        """The keys of the architecture that nobody has taken."""
        return sorted(
            key for key in self._metadata if key.startswith(self._prefix) and key[len(self._prefix) :] not in self._read
        )

    def problem(self, key: str, what: str) -> CheckpointError:
        """The error for a key and its value."""
        value = self._metadata.get(self._prefix + key)
        shown = "" if value is None or value.is_list else f" = {value.content!r:.80}"
        return CheckpointError(f"{self._path}: {self._prefix}{key}{shown} {what}.")

    def _take(self, key: str) -> Value | None:
        self._read.add(key)
        return self._metadata.get(self._prefix + key)

    def _default(self, key: str, default: T | None) -> T:
        if default is None:
            raise self.problem(key, "is missing")
        return default
