"""The parts of an Office Open XML package and how they refer to each other (ECMA-376, part 2)."""

from __future__ import annotations

import posixpath
import re
import zipfile
from typing import Any
from urllib.parse import unquote

from sheepop.data.extract.interface import ExtractionError

Element = Any

# The strict form of the standard names everything as the usual form does, in namespaces of its own.
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")
_USUAL = rb"http://schemas.openxmlformats.org/\1/2006/"
PROPERTIES = {"title": "title", "creator": "author", "language": "language", "created": "date"}
_DATE_LENGTH = len("2024-01-31")


class OfficeParts:
    """The parts by name, without a leading slash. References to parts that are not there are passed over."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        # Names of parts do not depend on case.
        self._names = {name.lower(): name for name in archive.namelist()}
        self._known: dict[str, list[tuple[str, str, str]]] = {}
        self.main = self._main()

    def xml(self, name: str) -> Element:
        """The root element of a part; raises `ExtractionError` when it is no XML."""
        return parse_xml(name, _STRICT.sub(_USUAL, self.bytes(name)))

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
                fact = PROPERTIES.get(local_name(element))
                value = " ".join((element.text or "").split())
                if fact and value:
                    facts[fact] = value[:_DATE_LENGTH] if fact == "date" else value
        return facts

    def _main(self) -> str:
        if "_rels/.rels" not in self._names:
            raise ExtractionError("damaged", "the package does not say which part is its document")
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


def parse_xml(name: str, data: bytes) -> Element:
    """The root element of a part of that name; entities stay unexpanded, and nothing is loaded.

    Raises `ExtractionError`: ``bomb`` for entities that multiply, ``damaged`` when it is no XML.
    """
    from lxml import etree

    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, huge_tree=False, load_dtd=False, remove_comments=True, remove_pis=True
    )
    try:
        return etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        reason = "bomb" if "amplification" in error.msg or "entity reference loop" in error.msg else "damaged"
        raise ExtractionError(reason, f"{name}: {error.msg}") from None


def local_name(element: Element) -> str:
    """The name of an element without its namespace."""
    return str(element.tag).rpartition("}")[2]
