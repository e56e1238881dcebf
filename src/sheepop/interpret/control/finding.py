"""What every analysis returns, numbers as plain data, a table, sentences and pictures, and how these are made."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor

from sheepop.core.facts import visible_line
from sheepop.core.files import finite
from sheepop.interpret.pictures import Picture, label_of, name_ticks, panel, plain
from sheepop.report.palette import TRAIN, VALIDATION

_COLOURS = (VALIDATION, TRAIN, "#009e73", "#848b94")
_ROW, _COLUMN = 0.3, 0.34  # inches
_WIDE_ENOUGH = 0.45  # inches of a cell with its number


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

    def numbers(self) -> dict[str, Any]:
        """The numbers of `to_dict`: by default those of all fields and of `derived`, without those of `left_out`."""
        return {name: each for name, each in data_of(self).items() if name not in self.left_out}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, with null for numbers that are not finite; ``--json`` prints it."""
        words = {"analysis": self.verb, "sentences": self.sentences(), "notes": list(self.notes)}
        found: dict[str, Any] = finite({**words, **self.numbers()})
        return found


@dataclass(frozen=True, eq=False)
class PromptFinding(Finding):
    """The result of an analysis at a prompt with these `tokens`, as text."""

    tokens: list[str]

    @property
    def labels(self) -> list[str]:
        """The tokens as labels of a picture."""
        return list(map(label_of, self.tokens))

    def named(self, token: int) -> str:
        """A token in words, by its number."""
        return f"token {token} ({visible_line(self.tokens[token])!r})"


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


def columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell; the first is aligned to the left.

    A name in the head may end in the format of its numbers, as in ``error:.1%``. Without rows there is no table.
    """
    if not rows:
        return []
    names, _, formats = zip(*(name.partition(":") for name in head), strict=True)
    written = [
        [each if isinstance(each, str) else format(each, form) for each, form in zip(row, formats, strict=True)]
        for row in rows
    ]
    first, *others = zip(names, *written, strict=True)
    wide = max(map(len, first))
    aligned = [[cell.ljust(wide) for cell in first]]
    aligned += [[cell.rjust(max(map(len, cells))) for cell in cells] for cells in others]
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def heat_map(
    name: str,
    title: str,
    numbers: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    meaning: str,
    *,
    decades: int | None = None,
) -> Picture:
    """A map of `numbers` (rows, columns), from 0 up, or on a logarithmic scale of some `decades` up to the largest.

    A number that is not finite is a blank; on a logarithmic scale, 0 is too.
    """
    from matplotlib.colors import LogNorm, Normalize

    size = min(20, max(5, _COLUMN * len(columns) + 2.5)), min(20, max(2.6, _ROW * len(rows) + 1.4))
    figure, axes = panel(*size, title)
    most = float(numbers.nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
    scale = Normalize(0, most) if decades is None else LogNorm(most / 10**decades, most, clip=True)
    drawn = numbers if decades is None else numbers.where(numbers > 0, math.nan)
    image = axes.imshow(drawn.numpy(), aspect="auto", interpolation="nearest", cmap="Blues", norm=scale)
    name_ticks(axes, "x", columns)
    name_ticks(axes, "y", rows)
    if size[0] / len(columns) >= _WIDE_ENOUGH:
        for row, values in enumerate(numbers.tolist()):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    colour = "white" if value and float(scale(value)) > 0.6 else "black"
                    axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label=meaning)
    return Picture(name, figure, {})


def lines_by_layer(name: str, title: str, lines: Mapping[str, Sequence[float]], meaning: str) -> Picture:
    """Lines of a number of each block, on a logarithmic axis."""
    figure, axes = panel(7, 4, title)
    for (label, values), colour in zip(lines.items(), _COLOURS, strict=False):
        axes.plot(values, marker="o", markersize=3.5, linewidth=1.6, color=colour, label=label)
    axes.set(xlabel="Block", ylabel=meaning, yscale="log")
    count = max(map(len, lines.values()))
    axes.set_xticks(range(0, count, math.ceil(count / 12)))
    axes.legend(frameon=False, fontsize=8)
    plain(axes)
    return Picture(name, figure, {})
