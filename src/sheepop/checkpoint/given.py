"""Settings in a file of another program, with a record of which keys were read, so that none is ignored."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sheepop.core.errors import CheckpointError

# The default that marks a required key.
REQUIRED: Any = object()
# Far above every published model, and far below what would overflow a product of two sizes.
LARGEST_NUMBER = 2**31 - 1
# For counts of items that are listed one by one.
LARGEST_COUNT = 10_000
LARGEST_CONTEXT = 2**24
_SHOWN_CHARACTERS = 80
_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_KINDS = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


class Given:
    """The settings in a file by key, which records the keys that were taken.

    `prefix` precedes all keys in the file. `tensors` are the names of the model's tensors.
    """

    # The smallest integer, and the error text for one out of bounds.
    smallest: ClassVar[int] = -LARGEST_NUMBER
    beyond: ClassVar[str] = "is more than any model has"

    def __init__(
        self, keys: Mapping[str, Any], where: str, prefix: str = "", tensors: Collection[str] = frozenset()
    ) -> None:
        self._keys, self.where, self.prefix, self.tensors = keys, where, prefix, tensors
        self._read: set[str] = set()
        self.notes: list[str] = []  # for the user, about what was read otherwise than it stands there

    def take(self, name: str, default: Any = REQUIRED, *aliases: str) -> Any:
        """Returns the value of `name` or of one of its aliases, or `default` if all are absent.

        Raises `CheckpointError` if the name and its aliases contradict each other, or if a required key is missing.
        """
        self._read.update((name, *aliases))
        found = [spelling for spelling in (name, *aliases) if spelling in self._keys]
        for spelling in found[1:]:
            if self._keys[spelling] != self._keys[found[0]]:
                raise self.problem(spelling, f"contradicts {name} = {shown(self._keys[found[0]])}")
        if not found and default is REQUIRED:
            raise self.missing(name)
        return self._keys[found[0]] if found else default

    def has(self, name: str) -> bool:
        """Whether the key is present and its value is not null."""
        return self._keys.get(name) is not None

    def typed(
        self,
        name: str,
        kind: type,
        default: Any = REQUIRED,
        *aliases: str,
        optional: bool = False,
        largest: int = LARGEST_NUMBER,
    ) -> Any:
        """Takes a value of type `kind`; refuses other types and integers above `largest`. `optional` allows null."""
        value = self.take(name, default, *aliases)
        if value is None and optional:
            return None
        if kind is int:
            value = self.single(name, value)
        if not self.is_a(kind, type(value)):
            raise self.problem(name, f"is not {_ONE[kind]}")
        if kind is float and not _is_finite(value):
            raise self.problem(name, "is not a finite number")
        if kind is int and not self.smallest <= value <= largest:
            raise self.problem(name, self.beyond)
        return kind(value)

    def entries(self, name: str, kind: type, default: Any = REQUIRED) -> list[Any]:
        """Takes a list whose entries have type `kind`."""
        values = self.take(name, default)
        if not isinstance(values, list) or not all(self.is_a(kind, found) for found in set(map(type, values))):
            raise self.problem(name, f"is not a list of {_KINDS[kind]}")
        if kind is float and not all(map(_is_finite, values)):
            raise self.problem(name, "has entries that are not finite")
        return [kind(value) for value in values]

    def single(self, name: str, value: Any) -> Any:
        """Returns the number that a value represents; subclasses handle formats with several notations."""
        return value

    def is_a(self, kind: type, found: type) -> bool:
        """Whether a value of type `found` has type `kind`; an integer also counts as a float."""
        return found is kind or (kind is float and found is int)

    def within(self, name: str, value: Any) -> Given:
        """Returns the settings in a table that is the value of a key."""
        if not isinstance(value, dict):
            raise self.problem(name, "is not a table of keys and values")
        return Given(value, f"{self.where}: {name}")

    def unread(self) -> list[str]:
        """Returns the keys that were not taken."""
        return sorted(self._keys.keys() - self._read)

    def missing(self, name: str) -> CheckpointError:
        """Returns an error for a required key that is not there."""
        return CheckpointError(f"{self.where}: {self.prefix}{name} is missing.")

    def problem(self, name: str, what: str) -> CheckpointError:
        """Returns an error that names the key and its value."""
        return CheckpointError(f"{self.where}: {self.prefix}{name}{self.shown(name)} {what}.")

    def shown(self, name: str) -> str:
        """Returns the value of a key in the form that follows the key in messages."""
        return f" = {shown(self._keys.get(name))}"


def shown(value: Any) -> str:
    """Returns a value of a foreign file for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_finite(value: float) -> bool:
    # Not math.isfinite, which fails for integers that are too large for a float.
    return abs(value) <= sys.float_info.max
