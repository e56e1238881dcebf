"""The settings in a file of another program, handed out one by one so that none is left unread."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from sheepop.core.errors import CheckpointError

# The default of a key that a file has to have.
REQUIRED: Any = object()
# Far above every published model, and far below what would overflow a product of two sizes.
LARGEST_NUMBER = 2**31 - 1
# Of what is listed or tabulated one by one.
LARGEST_COUNT = 10_000
LARGEST_CONTEXT = 2**24
_SHOWN_CHARACTERS = 80
_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_KINDS = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


class Given:
    """The settings in a file, by key; every key that is taken counts as read.

    In the file keys stand below `prefix`. `tensors` are the names of the tensors beside them.
    """

    # The smallest whole number, and what is said of one beyond the bounds.
    smallest: ClassVar[int] = -LARGEST_NUMBER
    beyond: ClassVar[str] = "is more than any model has"

    def __init__(
        self, keys: Mapping[str, Any], where: str, prefix: str = "", tensors: Collection[str] = frozenset()
    ) -> None:
        self._keys, self.where, self.prefix, self.tensors = keys, where, prefix, tensors
        self._read: set[str] = set()

    def take(self, name: str, default: Any = REQUIRED, *aliases: str) -> Any:
        """The value of `name`, or of the alias that stands in its place; `default` when it is absent.

        Raises `CheckpointError` when two spellings of one key contradict each other, or one without a default is
        missing.
        """
        self._read.update((name, *aliases))
        found = [spelling for spelling in (name, *aliases) if spelling in self._keys]
        for spelling in found[1:]:
            if self._keys[spelling] != self._keys[found[0]]:
                raise self.problem(spelling, f"contradicts {name} = {shown(self._keys[found[0]])}")
        if not found and default is REQUIRED:
            raise CheckpointError(f"{self.where}: {self.prefix}{name} is missing.")
        return self._keys[found[0]] if found else default

    def has(self, name: str) -> bool:
        """Whether the key is there, with a value that is not null."""
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
        """`take`, refusing what is no `kind`, and whole numbers beyond `largest`. Null is allowed where `optional`."""
        value = self.take(name, default, *aliases)
        if value is None and optional:
            return None
        if kind is int:
            value = self.single(name, value)
        if not self.is_a(kind, value):
            raise self.problem(name, f"is not {_ONE[kind]}")
        if kind is float and not _is_finite(value):
            raise self.problem(name, "is not a finite number")
        if kind is int and not self.smallest <= value <= largest:
            raise self.problem(name, self.beyond)
        return kind(value)

    def entries(self, name: str, kind: type, default: Any = REQUIRED) -> list[Any]:
        """The entries of a list, each a `kind`."""
        values = self.take(name, default)
        if not isinstance(values, list) or not all(self.is_a(kind, value) for value in values):
            raise self.problem(name, f"is not a list of {_KINDS[kind]}")
        if kind is float and not all(map(_is_finite, values)):
            raise self.problem(name, "has entries that are not finite")
        return [kind(value) for value in values]

    def single(self, name: str, value: Any) -> Any:
        """What stands for one number, where a format has several ways to write it."""
        return value

    def is_a(self, kind: type, value: Any) -> bool:
        """Whether a value is of `kind`; a whole number is a number, too."""
        return type(value) is kind or (kind is float and type(value) is int)

    def within(self, name: str, value: Any) -> Given:
        """The table that is the value of a key."""
        if not isinstance(value, dict):
            raise self.problem(name, "is not a table of keys and values")
        return Given(value, f"{self.where}: {name}")

    def unread(self) -> list[str]:
        """The keys that nobody has taken."""
        return sorted(self._keys.keys() - self._read)

    def problem(self, name: str, what: str) -> CheckpointError:
        """The error for a key and its value."""
        return CheckpointError(f"{self.where}: {self.prefix}{name}{self.shown(name)} {what}.")

    def shown(self, name: str) -> str:
        """The value of a key as a message has it, behind the key."""
        return f" = {shown(self._keys.get(name))}"


def shown(value: Any) -> str:
    """A value of a foreign file as it may stand in a message: short."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_finite(value: float) -> bool:
    # Not math.isfinite, which fails for whole numbers that are too large for a float.
    return abs(value) <= sys.float_info.max
