"""The parts of an Office Open XML package and how they refer to each other (ECMA-376, part 2)."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from sheepop.data.extract.interface import ExtractionError

# The libraries type their elements by the names in the file; here they are looked at as plain XML.
Element = Any

_STRICT = b"http://purl.oclc.org/ooxml/"
_PROPERTIES = {"title": "title", "creator": "author", "language": "language", "created": "date"}
_DATE_LENGTH = len("2024-01-31")


class OfficeParts:
    """The parts by name, without a leading slash. References to parts that are not there are passed over.

    `parse_xml` is the function of a library that makes elements of the bytes of a part.
    """

    def __init__(self, archive: zipfile.ZipFile, parse_xml: Callable[[bytes], Element]) -> None:
        self._archive, self._parse_xml = archive, parse_xml
        # Names of parts do not depend on case.
        self._names = {name.lower(): name for name in archive.namelist()}
        self._known: dict[str, list[tuple[str, str, str]]] = {}
        self.main = self._main()

    def xml(self, name: str) -> Element:
        """The root element of a part; raises `ExtractionError` when it is no XML."""
        from lxml.etree import XMLSyntaxError

        try:
            return self._parse_xml(self.bytes(name))
        except XMLSyntaxError as error:
            raise ExtractionError("damaged", f"{name}: {error.msg}") from None

    def first(self, part: str, kind: str) -> Element | None:
        """The root element of the first part to which `part` has a relationship of that kind."""
        names = self.related(part, kind)
        return self.xml(names[0]) if names else None

    def bytes(self, name: str) -> bytes:
        """The content of a part."""
        return self._archive.read(self._names[name.lower()])

    def related(self, part: str, kind: str) -> list[str]:
        """The parts to which `part` has a relationship of that kind, such as ``footnotes``, in their order."""
        return [target for found, _, target in self._relationships(part) if found == kind]

    def target(self, part: str, identifier: str) -> str | None:
        """The part that `part` calls `identifier`."""
        return next((target for _, found, target in self._relationships(part) if found == identifier), None)

    def properties(self) -> dict[str, str]:
        """Title, author, language and date, as far as the package states them."""
        facts: dict[str, str] = {}
        for name in self.related("", "core-properties"):
            for element in self.xml(name):
                fact = _PROPERTIES.get(local_name(element))
                value = " ".join((element.text or "").split())
                if fact and value:
                    facts[fact] = value[:_DATE_LENGTH] if fact == "date" else value
        return facts

    def _main(self) -> str:
        if "_rels/.rels" not in self._names:
            raise ExtractionError("damaged", "the package does not say which part is its document")
        if _STRICT in self.bytes("_rels/.rels"):
            raise ExtractionError(
                "unsupported", "it is in the strict form of Office Open XML; save it in the usual form"
            )
        parts = self.related("", "officeDocument")
        if not parts:
            raise ExtractionError("damaged", "the package has no part for its document")
        return parts[0]

    def _relationships(self, part: str) -> list[tuple[str, str, str]]:
        """Kind, identifier and part of every relationship of `part` (empty: of the package) inside the package."""
        if part not in self._known:
            self._known[part] = self._read_relationships(part)
        return self._known[part]

    def _read_relationships(self, part: str) -> list[tuple[str, str, str]]:
        folder, name = posixpath.split(part)
        rels = posixpath.join(folder, "_rels", f"{name}.rels")
        if rels.lower() not in self._names:
            return []
        found = []
        for element in self.xml(rels):
            target = unquote(element.get("Target") or "")
            if element.get("TargetMode") != "External" and target:
                path = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
                if path.lower() in self._names:
                    found.append(((element.get("Type") or "").rpartition("/")[2], element.get("Id") or "", path))
        return found


def local_name(element: Element) -> str:
    """The name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]
