"""Reads the parts of an Office Open XML package and their relationships (ECMA-376, part 2), metadata and formulas."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import unquote

from sheepop.data.extract.interface import Extracted, ExtractionError
from sheepop.data.extract.markdown import date_of, facts_of, join, marked
from sheepop.data.extract.page import SAFE

Element = Any
Blocks = list[tuple[str, str]]
Default = TypeVar("Default")

# The strict form of the standard uses the same names as the usual form, in other namespaces.
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")
_USUAL = rb"http://schemas.openxmlformats.org/\1/2006/"
_PROPERTIES = {"title": "title", "creator": "author", "initial-creator": "author", "language": "language"}
_PROPERTIES |= {"created": "date", "creation-date": "date"}
_ESCAPED = re.compile(r"_x(00[01][0-9A-Fa-f])_")
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"


class OfficeParts:
    """The parts of a package by name, without a leading slash; references to missing parts are ignored."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        # Part names are case-insensitive.
        self._names = {name.lower(): name for name in archive.namelist()}
        self._known: dict[str, list[tuple[str, str, str]]] = {}
        if "_rels/.rels" not in self._names:
            raise ExtractionError("damaged", "the package does not say which part is its document")
        parts = self.related("", "officeDocument")
        if not parts:
            raise ExtractionError("damaged", "the package has no part for its document")
        self.main = parts[0]

    def xml(self, name: str) -> Element:
        """Returns the root element of a part; raises `ExtractionError` if it is not XML."""
        return parse_xml(name, _STRICT.sub(_USUAL, self.bytes(name)))

    def first(self, part: str, kind: str) -> Element | None:
        """Returns the root element of the first part to which `part` has a relationship of this kind, or None."""
        names = self.related(part, kind)
        return self.xml(names[0]) if names else None

    def bytes(self, name: str) -> bytes:
        """Returns the content of a part."""
        return self._archive.read(self._names[name.lower()])

    def related(self, part: str, kind: str) -> list[str]:
        """Returns the parts to which `part` has a relationship of this kind, such as ``footnotes``, in order."""
        return [target for found, _, target in self._relationships(part) if found == kind]

    def target(self, part: str, identifier: str) -> str | None:
        """Returns the part that `part` refers to by the relationship `identifier`, or None."""
        return next((target for _, found, target in self._relationships(part) if found == identifier), None)

    def properties(self) -> dict[str, str]:
        """Returns ``title``, ``author``, ``language`` and ``date`` if the package states them."""
        return properties(*(self.xml(name) for name in self.related("", "core-properties")))

    def _relationships(self, part: str) -> list[tuple[str, str, str]]:
        """Returns (kind, identifier, target part) of the internal relationships of `part`; "" is the package."""
        if part in self._known:
            return self._known[part]
        folder, name = posixpath.split(part)
        rels = posixpath.join(folder, "_rels", f"{name}.rels")
        found: list[tuple[str, str, str]] = []
        for element in self.xml(rels) if rels.lower() in self._names else ():
            target = unquote(element.get("Target") or "")
            if element.get("TargetMode") != "External" and target:
                path = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
                if path.lower() in self._names:
                    found.append(((element.get("Type") or "").rpartition("/")[2], element.get("Id") or "", path))
        self._known[part] = found
        return found


def parse_xml(name: str, data: bytes) -> Element:
    """Parses XML without entities and other files; raises `ExtractionError` with `name`: ``bomb``, ``damaged``."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, load_dtd=False, **SAFE)
    try:
        return etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        reason = "bomb" if "amplification" in error.msg or "entity reference loop" in error.msg else "damaged"
        raise ExtractionError(reason, f"{name}: {error.msg}") from None


def local_name(element: Element) -> str:
    """Returns the name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]


def integer(text: str | None, default: Default, most: int = 10**9) -> int | Default:
    """Returns a number of up to nine digits, at most `most`; `default` if the text is not one."""
    return min(int(text), most) if text and re.fullmatch(r"\d{1,9}", text) else default


def properties(*roots: Element) -> dict[str, str]:
    """Returns ``title``, ``author``, ``language`` and ``date`` if these parts with properties state them."""
    stated: dict[str, str] = {}
    for element in (element for root in roots for element in root.iter()):
        fact = _PROPERTIES.get(local_name(element))
        if fact and element.text:
            stated.setdefault(fact, date_of(element.text) if fact == "date" else element.text)
    return facts_of(stated)


def unescaped(text: str) -> str:
    """Returns a text with its escaped characters, such as ``_x000D_`` (ECMA-376, part 1, 22.9.2.19)."""
    return _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text) if "_x" in text else text


def document(text: str, facts: dict[str, str]) -> Extracted:
    """Returns one document of prose; raises `ExtractionError` if it has no text."""
    if not text:
        raise ExtractionError("empty", "the document has no text")
    return Extracted(text, metadata=facts)


def presentation(slides: Iterable[Blocks], facts: dict[str, str]) -> Extracted:
    """Returns a document of prose with a mark ``slide N`` for each slide; raises `ExtractionError` if none has text."""
    text, marks = marked((f"slide {number}", join(blocks)) for number, blocks in enumerate(slides, 1))
    if not text:
        raise ExtractionError("empty", "the slides have no text")
    return Extracted(text, marks=marks, metadata=facts)


def with_notes(blocks: Blocks, notes: list[str]) -> Blocks:
    """Returns the blocks of a slide followed by its speaker notes."""
    return [*blocks, ("text", "\n".join(["Notes:", *notes]))] if notes else blocks


def formula(element: Element) -> str:
    """Returns the formula in an ``m:oMath`` element as text: ``a/b``, ``x^2``, ``x_i``, ``√(x)``."""
    name = str(element.tag).removeprefix(_MATH)
    if name == "t":
        return element.text or ""
    if name in _WRITTEN:
        return _WRITTEN[name](element)
    return "".join(formula(child) for child in element if not str(child.tag).endswith("Pr"))


def _part(element: Element, name: str) -> str:
    part = element.find(f"{_MATH}{name}")
    return "" if part is None else formula(part)


def _grouped(text: str) -> str:
    return text if len(text) <= 1 or text.isalnum() else f"({text})"


def _nary(element: Element) -> str:
    sign = element.find(f"{_MATH}naryPr/{_MATH}chr")
    text = "∫" if sign is None else sign.get(f"{_MATH}val") or ""
    limits = [name for name in ("sub", "sup") if _part(element, name)]
    return f"{_raised(element, text, *limits)} {_part(element, 'e')}"


def _raised(element: Element, text: str, *names: str) -> str:
    """Returns the text with its subscript and superscript, as ``_`` and ``^``."""
    return text + "".join(f"{'_' if name == 'sub' else '^'}{_grouped(_part(element, name))}" for name in names)


_WRITTEN: dict[str, Callable[[Element], str]] = {
    "f": lambda element: f"{_grouped(_part(element, 'num'))}/{_grouped(_part(element, 'den'))}",
    "sSup": lambda element: _raised(element, _grouped(_part(element, "e")), "sup"),
    "sSub": lambda element: _raised(element, _grouped(_part(element, "e")), "sub"),
    "sSubSup": lambda element: _raised(element, _grouped(_part(element, "e")), "sub", "sup"),
    "d": lambda element: f"({', '.join(formula(part) for part in element.findall(f'{_MATH}e'))})",
    "rad": lambda element: f"{_part(element, 'deg')}√({_part(element, 'e')})",
    "nary": _nary,
}
