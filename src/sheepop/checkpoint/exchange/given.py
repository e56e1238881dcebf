"""The keys of a foreign ``config.json``, handed out one by one so that none is left unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sheepop.core.errors import CheckpointError

_SHOWN_CHARACTERS = 80
_MISSING = object()
# Far above every published model, and far below what would overflow a product of two sizes.
LARGEST_NUMBER = 2**31
# Of what is listed or tabulated one by one.
LARGEST_COUNT = 10_000
LARGEST_CONTEXT = 2**24


class Given:
    """A table of keys and values; every key that is taken counts as read."""

    def __init__(self, keys: Mapping[str, Any], where: str) -> None:
        self._keys, self.where = keys, where
        self._read: set[str] = set()

    def take(self, name: str, default: Any, *aliases: str) -> Any:
        """The value of `name`, or of the alias that stands in its place; `default` when it is absent.

        Raises `CheckpointError` when two spellings of one key contradict each other.
        """
        found: Any = _MISSING
        for spelling in (name, *aliases):
            self._read.add(spelling)
            value = self._keys.get(spelling, _MISSING)
            if value is _MISSING:
                continue
            if found is not _MISSING and value != found:
                raise self.problem(spelling, f"contradicts {name} = {shown(found)}")
            found = value
        return default if found is _MISSING else found

    def has(self, name: str) -> bool:
        """Whether the key is there, with a value that is not null."""
        return self._keys.get(name) is not None

    def typed(
        self,
        name: str,
        kind: type,
        default: Any,
        *aliases: str,
        optional: bool = False,
        largest: int = LARGEST_NUMBER,
    ) -> Any:
        """`take`, refusing what is no `kind` (a whole number counts as a float) and whole numbers beyond `largest`."""
        value = self.take(name, default, *aliases)
        if value is None and optional:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and is_number and math.isfinite(value):
            return float(value)
        if type(value) is not kind or kind is float:
            raise self.problem(name, f"is not {_KINDS[kind]}")
        if isinstance(value, int) and abs(value) > largest:
            raise self.problem(name, "is more than any model has")
        return value

    def unread(self) -> list[str]:
        """The keys that nobody has taken."""
        return sorted(self._keys.keys() - self._read)

    def problem(self, name: str, what: str) -> CheckpointError:
        """The error for a key and its value."""
        return CheckpointError(f"{self.where}: {name} = {shown(self._keys.get(name))} {what}.")

    def within(self, name: str, value: Any) -> Given:
        """The table that is the value of a key."""
        if not isinstance(value, dict):
            raise self.problem(name, "is not a table of keys and values")
        return Given(value, f"{self.where}: {name}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def shown(value: Any) -> str:
    """A value of a foreign file as it may stand in a message: short."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
