"""What every analysis returns: numbers as plain data, a table, sentences and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sheepop.interpret.pictures import Picture


@dataclass(frozen=True, eq=False)
class Finding:
    """The result of an analysis. `notes` are sentences about what was done to the model before."""

    verb: ClassVar[str]
    notes: tuple[str, ...]

    def table(self) -> list[str]:
        """The lines of a table for a terminal."""
        raise NotImplementedError

    def sentences(self) -> list[str]:
        """What the numbers say, in words."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """The numbers as plain data."""
        raise NotImplementedError

    def pictures(self) -> Iterator[Picture]:
        """Pictures of the numbers; none by default."""
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """The whole result as plain data, which ``--json`` prints and ``VERB.json`` holds."""
        return {"analysis": self.verb, "notes": list(self.notes), "sentences": self.sentences(), **self.data()}


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell; the first is aligned to the left."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
