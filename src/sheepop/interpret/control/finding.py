"""What every analysis returns: numbers as plain data, a table, sentences and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor

from sheepop.core.facts import visible_line
from sheepop.core.files import finite
from sheepop.interpret.pictures import Picture


@dataclass(frozen=True, eq=False)
class Finding(ABC):
    """The result of an analysis. `notes` are sentences about what was done to the model before.

    `derived` names properties that `to_dict` has beside the fields, and `left_out` fields that it has not.
    """

    verb: ClassVar[str]
    derived: ClassVar[tuple[str, ...]] = ()
    left_out: ClassVar[tuple[str, ...]] = ()
    notes: tuple[str, ...]

    @abstractmethod
    def table(self) -> list[str]:
        """The lines of a table for a terminal."""

    @abstractmethod
    def sentences(self) -> list[str]:
        """What the numbers say, in words."""

    def pictures(self) -> Iterator[Picture]:
        """Pictures of the numbers; none by default."""
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data; ``--json`` prints it."""
        return said(self, {name: each for name, each in data_of(self).items() if name not in self.left_out})


@dataclass(frozen=True, eq=False)
class PromptFinding(Finding):
    """The result of an analysis at a prompt with these `tokens`, as text."""

    tokens: list[str]

    def named(self, token: int) -> str:
        """A token in words, by its number."""
        return f"token {token} ({visible_line(self.tokens[token])!r})"


def said(finding: Finding, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_dict` returns of a finding that names its numbers itself; those that are not finite are null."""
    words = {"analysis": finding.verb, "sentences": finding.sentences(), "notes": list(finding.notes)}
    found: dict[str, Any] = finite({**words, **numbers})
    return found


def data_of(value: Any) -> Any:
    """Plain data of tensors, tuples, mappings and dataclasses, with the properties that a class names in `derived`.

    Fields whose names end in ``direction`` are left out.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "derived", ()))
        return {name: data_of(getattr(value, name)) for name in names if not name.endswith("direction")}
    if isinstance(value, Mapping):
        return {name: data_of(each) for name, each in value.items()}
    return [data_of(each) for each in value] if isinstance(value, list | tuple) else value


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell; the first is aligned to the left.

    Without rows there is no table.
    """
    if not rows:
        return []
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
