"""The text of a shape on a slide (DrawingML): its paragraphs, with bullets and numbers."""

from __future__ import annotations

import re

from sheepop.data.extract.office_math import formula
from sheepop.data.extract.office_parts import Element, local_name

A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_DEEPEST_LEVEL = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lines(shape: Element) -> list[tuple[Element, str]]:
    """The paragraphs in a shape with the text of each; a line break in one is a line break in the text."""
    return [(paragraph, _text(paragraph)) for paragraph in shape.iter(f"{A}p")]


def paragraphs(shape: Element, *, bulleted: bool) -> list[tuple[str, str]]:
    """The paragraphs as blocks, kind and text; `bulleted` tells whether they have bullets unless they say otherwise."""
    found = [(paragraph, text.strip()) for paragraph, text in lines(shape) if text.strip()]
    counts: dict[int, int] = {}
    blocks: list[tuple[str, str]] = []
    for paragraph, text in found:
        properties = paragraph.find(f"{A}pPr")
        level = _level(properties)
        label = _label(properties, level, counts, bulleted=bulleted and len(found) > 1)
        if label is None:
            blocks.append(("text", text))
        else:
            indent = "  " * level
            first, *rest = text.split("\n")
            more = [f"{indent}{' ' * len(label)} {line}" for line in rest]
            blocks.append(("item", "\n".join([f"{indent}{label} {first}", *more])))
    return blocks


def _text(paragraph: Element) -> str:
    return "".join(map(_piece, paragraph))


def _piece(element: Element) -> str:
    name = local_name(element)
    if name in ("r", "fld"):
        return "".join(text.text or "" for text in element.findall(f"{A}t"))
    if name == "br":
        return "\n"
    if name == "AlternateContent":
        return "".join(map(_piece, element[0])) if len(element) else ""
    # A formula: a14:m around it.
    return formula(element) if name in ("m", "oMath", "oMathPara") else ""


def _label(properties: Element | None, level: int, counts: dict[int, int], *, bulleted: bool) -> str | None:
    """The bullet or the number of a paragraph, None for neither; numbers go on in `counts`, by level."""
    for deeper in [deeper for deeper in counts if deeper > level]:
        del counts[deeper]
    bullet = None
    if properties is not None:
        bullet = next((child for child in properties if local_name(child) in _BULLETS), None)
    kind = local_name(bullet) if bullet is not None else "buChar" if bulleted else "buNone"
    if bullet is None or kind != "buAutoNum":
        counts.pop(level, None)
        return None if kind == "buNone" else "-"
    start = bullet.get("startAt") or "1"
    counts[level] = counts[level] + 1 if level in counts else int(start) if re.fullmatch(r"\d{1,5}", start) else 1
    return _number(counts[level], bullet.get("type") or "")


def _number(number: int, kind: str) -> str:
    text = str(number)
    if kind.startswith("alpha") and number <= len(_LETTERS):
        text = _LETTERS[number - 1] if kind.startswith("alphaLc") else _LETTERS[number - 1].upper()
    return f"({text})" if kind.endswith("ParenBoth") else f"{text})" if kind.endswith("ParenR") else f"{text}."


def _level(properties: Element | None) -> int:
    text = "" if properties is None else properties.get("lvl") or ""
    return min(int(text), _DEEPEST_LEVEL) if re.fullmatch(r"\d", text) else 0


_BULLETS = frozenset({"buNone", "buChar", "buAutoNum", "buBlip"})
