"""Reads the styles and list numbering of Word documents: heading levels, code, and the labels of list items."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from sheepop.data.extract.office_parts import Element, integer

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
# The names of code styles in Word, pandoc and LibreOffice.
CODE_STYLES = frozenset(
    {"code", "code block", "html preformatted", "macro", "preformatted text", "source code", "verbatim"}
)
_BODY_TEXT_LEVEL = 9
LONGEST_CHAIN = 20
_LEVELS = 9
_PLACE = re.compile(r"%([1-9])")
_LARGEST = 10_000


@cache
def _path(names: str) -> str:
    return "/".join(f"{W}{name}" for name in names.split("/"))


def value(element: Element, names: str) -> str | None:
    """Returns the value of the first element at a path such as ``pPr/pStyle`` ("" without one), or None if absent."""
    found = element.find(_path(names))
    return None if found is None else found.get(f"{W}val") or ""


class ParagraphStyle(NamedTuple):
    """A style: its identifier, its heading level (0 for none), and whether it is for code."""

    identifier: str
    heading: int
    is_code: bool


class Styles:
    """The styles of a document, from the root of its part ``styles``."""

    def __init__(self, root: Element | None) -> None:
        elements = [] if root is None else root.findall(f"{W}style")
        self._elements: dict[str, Element] = {element.get(f"{W}styleId"): element for element in elements}
        self._default = next((element.get(f"{W}styleId") for element in elements if _is_default(element)), "")
        self._known: dict[tuple[str, int], ParagraphStyle] = {}

    def of(self, paragraph: Element) -> ParagraphStyle:
        """Returns the style of a paragraph, with the outline level that the paragraph itself may set."""
        key = self._identifier(paragraph), _outline_level(paragraph)
        if key not in self._known:
            self._known[key] = self._described(*key)
        return self._known[key]

    def numbering(self, paragraph: Element) -> tuple[str, int | None]:
        """Returns the list number of a paragraph ("" for none), and its level in the list, or None if not stated."""
        level: int | None = None
        for element in (paragraph, *self._chain(self._identifier(paragraph))):
            properties = element.find(_path("pPr/numPr"))
            if properties is not None:
                level = integer(value(properties, "ilvl"), None) if level is None else level
                number = value(properties, "numId")
                if number is not None:
                    return number, level if element is not paragraph or level is not None else 0
        return "", level

    def _identifier(self, paragraph: Element) -> str:
        style = value(paragraph, "pPr/pStyle")
        return (self._default if style is None else style) or ""

    def _described(self, identifier: str, level: int) -> ParagraphStyle:
        chain = self._chain(identifier)
        names = [(value(element, "name") or "").lower() for element in chain]
        level = next((found for found in (level, *map(_outline_level, chain)) if found >= 0), _BODY_TEXT_LEVEL)
        heading = 0 if level >= _BODY_TEXT_LEVEL else level + 1
        for name in names:
            match = _HEADING.fullmatch(name)
            heading = heading or (int(match[1]) if match else int(name == "title"))
        return ParagraphStyle(identifier, heading, not CODE_STYLES.isdisjoint(names))

    def _chain(self, identifier: str) -> list[Element]:
        """Returns the style followed by its parent styles."""
        chain: list[Element] = []
        while identifier in self._elements and len(chain) < LONGEST_CHAIN:
            chain.append(self._elements[identifier])
            identifier = value(chain[-1], "basedOn") or ""
        return chain


def _is_default(element: Element) -> bool:
    return element.get(f"{W}type") == "paragraph" and element.get(f"{W}default") in ("1", "true", "on")


def _outline_level(element: Element) -> int:
    return integer(value(element, "pPr/outlineLvl"), -1)


class _Level(NamedTuple):
    start: int = 1
    style: str = "decimal"
    text: str = ""
    paragraph_style: str = ""


class Numbering:
    """Gives paragraphs their labels, in the order of the document (ECMA-376, part 1, 17.9)."""

    def __init__(self, root: Element | None) -> None:
        # Several lists may share their levels and the last number on each.
        shared: dict[str, tuple[list[_Level], dict[int, int]]] = {}
        self._lists: dict[str, tuple[list[_Level], dict[int, int]]] = {}
        self._restarts: dict[str, dict[int, int]] = {}
        for element in () if root is None else root.findall(f"{W}abstractNum"):
            shared[element.get(f"{W}abstractNumId") or ""] = _levels(element), {}
        for element in () if root is None else root.findall(f"{W}num"):
            number = element.get(f"{W}numId") or ""
            self._lists[number] = shared.get(value(element, "abstractNumId") or "", ([], {}))
            self._restarts[number] = {
                integer(override.get(f"{W}ilvl"), 0): integer(start, 1)
                for override in element.findall(f"{W}lvlOverride")
                if (start := value(override, "startOverride")) is not None
            }

    def level_of_style(self, number: str, style: str) -> int:
        """Returns the level of list `number` that belongs to this paragraph style, or 0."""
        levels, _ = self._lists.get(number, ([], {}))
        return next((at for at, level in enumerate(levels) if level.paragraph_style == style), 0)

    def label(self, number: str, level: int) -> str | None:
        """Returns the label of the next item of list `number` on `level`, such as ``-``, ``3.`` or ``b)``, or None."""
        levels, counts = self._lists.get(number, ([], {}))
        if not 0 <= level < len(levels):
            return None
        restart = self._restarts[number].pop(level, None)
        count(counts, level, levels[level].start if restart is None else restart, restarts=restart is not None)
        if levels[level].style == "bullet":
            return "-"

        def numbered(place: re.Match[str]) -> str:
            at = int(place[1]) - 1
            return numeral(counts.get(at, levels[at].start), levels[at].style)

        return _PLACE.sub(numbered, levels[level].text).strip()


def _levels(element: Element) -> list[_Level]:
    levels = [_Level()] * _LEVELS
    for child in element.findall(f"{W}lvl"):
        at = integer(child.get(f"{W}ilvl"), -1)
        if 0 <= at < _LEVELS:
            style, text, of_style = (value(child, name) or "" for name in ("numFmt", "lvlText", "pStyle"))
            levels[at] = _Level(integer(value(child, "start"), 1), style or "decimal", text, of_style)
    return levels


def count(counts: dict[int, int], level: int, first: int, *, restarts: bool = False) -> int:
    """Returns the next number on a level of a list and updates its last numbers `counts`; deeper levels restart."""
    for deeper in [at for at in counts if at > level]:
        del counts[deeper]
    counts[level] = first if restarts or level not in counts else counts[level] + 1
    return counts[level]


def numeral(number: int, style: str) -> str:
    """Returns a number in a numbering format of Word (ECMA-376, part 1, 17.18.59); rare formats become decimal."""
    return _NUMERALS.get(style, str)(number) if 0 < number <= _LARGEST else str(number)


def _letters(number: int) -> str:
    """Returns A to Z, then AA, BB and so on, like Word."""
    return chr(ord("A") + (number - 1) % 26) * ((number - 1) // 26 + 1)


def _roman(number: int) -> str:
    text = ""
    for size, sign in _ROMAN.items():
        text += sign * (number // size)
        number %= size
    return text


_ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX"}
_ROMAN |= {5: "V", 4: "IV", 1: "I"}
_NUMERALS: dict[str, Callable[[int], str]] = {
    "decimalZero": lambda number: f"{number:02d}",
    "upperLetter": _letters,
    "lowerLetter": lambda number: _letters(number).lower(),
    "upperRoman": _roman,
    "lowerRoman": lambda number: _roman(number).lower(),
    "none": lambda number: "",
}
