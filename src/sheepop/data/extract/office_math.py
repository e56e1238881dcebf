"""Formulas of Office documents (OMML) in one line, written as one would type them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lxml.etree import _Element

_SPACE = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_PROPERTY = "Pr"


def formula(element: _Element) -> str:
    """The formula below an ``m:oMath`` element: ``a/b``, ``x^2``, ``x_i``, ``√(x)``."""
    name = str(element.tag).removeprefix(_SPACE)
    if name == "t":
        return element.text or ""
    if name in _WRITTEN:
        return _WRITTEN[name](element)
    return "".join(formula(child) for child in element if not str(child.tag).endswith(_PROPERTY))


def _part(element: _Element, name: str) -> str:
    part = element.find(f"{_SPACE}{name}")
    return "" if part is None else formula(part)


def _grouped(text: str) -> str:
    return text if len(text) <= 1 or text.isalnum() else f"({text})"


def _nary(element: _Element) -> str:
    sign = element.find(f"{_SPACE}naryPr/{_SPACE}chr")
    text = "∫" if sign is None else sign.get(f"{_SPACE}val") or ""
    for name, mark in (("sub", "_"), ("sup", "^")):
        limit = _part(element, name)
        text += f"{mark}{_grouped(limit)}" if limit else ""
    return f"{text} {_part(element, 'e')}"


def _root(element: _Element) -> str:
    degree = _part(element, "deg")
    return f"{degree}√({_part(element, 'e')})"


_WRITTEN: dict[str, Callable[[_Element], str]] = {
    "f": lambda element: f"{_grouped(_part(element, 'num'))}/{_grouped(_part(element, 'den'))}",
    "sSup": lambda element: f"{_grouped(_part(element, 'e'))}^{_grouped(_part(element, 'sup'))}",
    "sSub": lambda element: f"{_grouped(_part(element, 'e'))}_{_grouped(_part(element, 'sub'))}",
    "sSubSup": lambda element: (
        f"{_grouped(_part(element, 'e'))}_{_grouped(_part(element, 'sub'))}^{_grouped(_part(element, 'sup'))}"
    ),
    "d": lambda element: f"({', '.join(formula(part) for part in element.findall(f'{_SPACE}e'))})",
    "rad": _root,
    "nary": _nary,
}
