"""What the styles of a Word document say of its paragraphs: heading, code, item of a list."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sheepop.data.extract.office_parts import Element
from sheepop.data.extract.word_numbering import W

_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
# Names that Word, pandoc and LibreOffice give to the style of code.
CODE_STYLES = frozenset(
    {"code", "code block", "html preformatted", "macro", "preformatted text", "source code", "verbatim"}
)
_BODY_TEXT_LEVEL = 9
_DEEPEST_HEADING = 6
_LONGEST_CHAIN = 20


@dataclass(frozen=True, slots=True)
class ParagraphStyle:
    """A style by its identifier: the level of heading (1 to 6, 0 for none), and whether it is one of code."""

    identifier: str = ""
    heading: int = 0
    is_code: bool = False


class Styles:
    """The styles of a document, from the root of its part for them."""

    def __init__(self, root: Element | None) -> None:
        elements = [] if root is None else root.findall(f"{W}style")
        self._elements: dict[str, Element] = {element.get(f"{W}styleId"): element for element in elements}
        default = [element for element in elements if _is_default(element)]
        self._default = default[0].get(f"{W}styleId") if default else ""
        self._known: dict[tuple[str, int | None], ParagraphStyle] = {}

    def of(self, paragraph: Element) -> ParagraphStyle:
        """The style of a paragraph, with what the paragraph itself says of its level."""
        identifier = self._identifier(paragraph)
        key = identifier, _outline_level(paragraph)
        if key not in self._known:
            self._known[key] = self._described(*key)
        return self._known[key]

    def numbering(self, paragraph: Element) -> tuple[str, int | None]:
        """The number of the list to which a paragraph belongs, empty for none, and its level where it is given."""
        level: int | None = None
        for element in (paragraph, *self._chain(self._identifier(paragraph))):
            properties = element.find(f"{W}pPr/{W}numPr")
            if properties is not None:
                level = _value(properties.find(f"{W}ilvl")) if level is None else level
                number = properties.find(f"{W}numId")
                if number is not None:
                    return number.get(f"{W}val") or "", level if element is not paragraph or level is not None else 0
        return "", level

    def _identifier(self, paragraph: Element) -> str:
        style = paragraph.find(f"{W}pPr/{W}pStyle")
        return (style.get(f"{W}val") if style is not None else self._default) or ""

    def _described(self, identifier: str, level: int | None) -> ParagraphStyle:
        chain = self._chain(identifier)
        names = [
            (element.find(f"{W}name").get(f"{W}val") or "") for element in chain if element.find(f"{W}name") is not None
        ]
        if level is None:
            level = next((found for element in chain if (found := _outline_level(element)) is not None), None)
        heading = 0 if level is None or level >= _BODY_TEXT_LEVEL else level + 1
        for name in names:
            match = _HEADING.fullmatch(name)
            heading = heading or (int(match[1]) if match else 1 if name.lower() == "title" else 0)
        return ParagraphStyle(
            identifier, min(heading, _DEEPEST_HEADING), any(name.lower() in CODE_STYLES for name in names)
        )

    def _chain(self, identifier: str) -> list[Element]:
        """The style and those on which it is based, the nearest first."""
        chain: list[Element] = []
        while identifier in self._elements and len(chain) < _LONGEST_CHAIN:
            chain.append(self._elements[identifier])
            base = chain[-1].find(f"{W}basedOn")
            identifier = "" if base is None else base.get(f"{W}val") or ""
        return chain


def _is_default(element: Element) -> bool:
    return element.get(f"{W}type") == "paragraph" and element.get(f"{W}default") in ("1", "true", "on")


def _outline_level(element: Element) -> int | None:
    return _value(element.find(f"{W}pPr/{W}outlineLvl"))


def _value(element: Element | None) -> int | None:
    text = None if element is None else element.get(f"{W}val")
    return int(text) if text and re.fullmatch(r"\d{1,3}", text) else None
