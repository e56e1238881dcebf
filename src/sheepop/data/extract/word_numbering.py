"""The numbers in front of numbered paragraphs of a Word document, which the file defines but does not hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.etree import _Element

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_LEVELS = 9
_PLACE = re.compile(r"%([1-9])")
_LARGEST = 10_000


@dataclass(slots=True)
class _Level:
    start: int = 1
    style: str = "decimal"
    text: str = ""
    paragraph_style: str = ""


@dataclass(slots=True)
class _List:
    """A list being numbered: its levels, and the last number given on each."""

    levels: list[_Level]
    last: list[int | None] = field(default_factory=lambda: [None] * _LEVELS)


class Numbering:
    """Gives paragraphs their labels, in the order of the document (ECMA-376, part 1, 17.9)."""

    def __init__(self, root: _Element | None) -> None:
        self._lists: dict[str, _List] = {}
        self._of_number: dict[str, str] = {}
        self._restarts: dict[str, dict[int, int]] = {}
        if root is None:
            return
        for element in root.findall(f"{W}abstractNum"):
            self._lists[element.get(f"{W}abstractNumId") or ""] = _List(_levels(element))
        for element in root.findall(f"{W}num"):
            number = element.get(f"{W}numId") or ""
            self._of_number[number] = _value(element.find(f"{W}abstractNumId"), "")
            self._restarts[number] = {
                _integer(override.get(f"{W}ilvl"), 0): _integer(_value(start, "1"), 1)
                for override in element.findall(f"{W}lvlOverride")
                if (start := override.find(f"{W}startOverride")) is not None
            }

    def level_of_style(self, number: str, style: str) -> int:
        """The level of a list that paragraphs of that style have."""
        found = self._lists.get(self._of_number.get(number, ""))
        levels = found.levels if found else []
        return next((at for at, level in enumerate(levels) if level.paragraph_style == style), 0)

    def label(self, number: str, level: int) -> str | None:
        """The label of the next paragraph of list `number` on `level`: ``-``, ``3.``, ``b)``; None for no such list."""
        found = self._lists.get(self._of_number.get(number, ""))
        if found is None or not 0 <= level < len(found.levels):
            return None
        restart = self._restarts[number].pop(level, None)
        last = found.last[level]
        first = found.levels[level].start if restart is None else restart
        found.last[level] = first if restart is not None or last is None else last + 1
        found.last[level + 1 :] = [None] * (_LEVELS - level - 1)
        if found.levels[level].style == "bullet":
            return "-"
        return _PLACE.sub(lambda match: _number(found, int(match[1]) - 1), found.levels[level].text).strip()


def _number(found: _List, level: int) -> str:
    if level >= len(found.levels):
        return ""
    value = found.last[level]
    number = found.levels[level].start if value is None else value
    return NUMBERS.get(found.levels[level].style, str)(number) if 0 < number <= _LARGEST else str(number)


def _levels(element: _Element) -> list[_Level]:
    levels = [_Level() for _ in range(_LEVELS)]
    for child in element.findall(f"{W}lvl"):
        at = _integer(child.get(f"{W}ilvl"), -1)
        if 0 <= at < _LEVELS:
            levels[at] = _Level(
                _integer(_value(child.find(f"{W}start"), "1"), 1),
                _value(child.find(f"{W}numFmt"), "decimal"),
                _value(child.find(f"{W}lvlText"), ""),
                _value(child.find(f"{W}pStyle"), ""),
            )
    return levels


def _value(element: _Element | None, default: str) -> str:
    return default if element is None else element.get(f"{W}val") or default


def _integer(text: str | None, default: int) -> int:
    return int(text) if text and re.fullmatch(r"\d{1,9}", text) else default


def _letters(number: int) -> str:
    """A to Z, then AA, BB and so on, as Word counts."""
    return chr(ord("A") + (number - 1) % 26) * ((number - 1) // 26 + 1)


def _roman(number: int) -> str:
    text = ""
    for value, sign in zip(_ROMAN_VALUES, _ROMAN_SIGNS, strict=True):
        text += sign * (number // value)
        number %= value
    return text


_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_ROMAN_SIGNS = ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I")
NUMBERS: dict[str, Callable[[int], str]] = {
    "decimalZero": lambda number: f"{number:02d}",
    "upperLetter": _letters,
    "lowerLetter": lambda number: _letters(number).lower(),
    "upperRoman": _roman,
    "lowerRoman": lambda number: _roman(number).lower(),
    "none": lambda number: "",
}
