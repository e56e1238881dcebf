"""Turns electronic books (EPUB 2 and 3) into one Markdown document of the chapters in reading order."""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from urllib.parse import unquote

from sheepop.data.extract.archive import safe_zip
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import date_of, facts_of, marked
from sheepop.data.extract.office_parts import Element, local_name, parse_xml
from sheepop.data.extract.page_blocks import Block, blocks_of, page_text

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# Encryption of fonts only, which does not concern the text.
_FONTS_ONLY = frozenset({"http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"})
_PAGES = frozenset({"application/xhtml+xml", "text/html", "text/x-oeb1-document", "application/x-dtbook+xml"})
_NCX = "application/x-dtbncx+xml"
_FACTS = {"title": "title", "creator": "author", "language": "language", "rights": "rights", "date": "date"}
_LONGEST_TITLE = 200


def extract_epub(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark ``chapter N: title`` for each chapter, and refuses unreadable chapters.

    Metadata: ``title``, ``author``, ``language``, ``rights`` and ``date`` if the book states them. Raises
    `ExtractionError`: ``encrypted`` for a protected book, ``damaged`` if the list of chapters cannot be read.
    """
    with safe_zip(content, context) as archive:
        methods = _xml(archive, _ENCRYPTION).iter("{*}EncryptionMethod") if _ENCRYPTION in archive.namelist() else ()
        # The key of a protected book also has a method element; any method that is not for fonts means protection.
        if any(method.get("Algorithm") not in _FONTS_ONLY for method in methods):
            raise ExtractionError("encrypted", "the book is copy-protected")
        folder, package = _package(archive)
        items = {item.get("id"): item for item in package.iter("{*}item")}
        tables = [item for item in items.values() if _is_navigation(item) or item.get("media-type") == _NCX]
        titles = _titles(archive, {_path(folder, item) for item in tables})
        # Each file appears in the reading order only once.
        files: dict[str, str] = {}
        for reference in package.iter("{*}itemref"):
            item = _readable(items, reference.get("idref") or "")
            if item is None:
                files.setdefault(f"called {reference.get('idref') or ''}", "")
            elif not _is_navigation(item):
                files.setdefault(_path(folder, item), item.get("media-type") or "")
        chapters: list[tuple[str, str]] = []
        for number, (name, media_type) in enumerate(files.items(), 1):
            place = f"chapter {number}"
            try:
                blocks = _chapter(archive, name, media_type)
            except ExtractionError as error:
                yield Refused(place, error.reason, f"{name}: {error.detail}")
                continue
            heading = next((block.text for block in blocks if block.kind == "heading"), "")
            title = titles.get(name) or _short(heading.lstrip("#").strip())
            chapters.append((f"{place}: {title}" if title else place, page_text(blocks)))
        text, marks = marked(chapters)
        if not text:
            raise ExtractionError("empty", "its chapters have no text")
        yield Extracted(text, marks=marks, metadata=_facts(package))


def _readable(items: dict[str | None, Element], identifier: str) -> Element | None:
    """Returns the item, or the first of its fallbacks that is a page (EPUB 3.3, 3.5.1)."""
    item = first = items.get(identifier)
    for _ in items:
        if item is None or item.get("media-type") in _PAGES:
            break
        item = items.get(item.get("fallback") or "")
    return first if item is None else item


def _package(archive: zipfile.ZipFile) -> tuple[str, Element]:
    """Returns the folder of the package document and the document itself, which lists the files and the metadata."""
    if _CONTAINER not in archive.namelist():
        raise ExtractionError("damaged", f"it has no {_CONTAINER}")
    root = next(_xml(archive, _CONTAINER).iter("{*}rootfile"), None)
    name = "" if root is None else unquote(root.get("full-path") or "")
    if name not in archive.namelist():
        raise ExtractionError("damaged", "its list of contents is missing")
    return posixpath.dirname(name), _xml(archive, name)


def _path(folder: str, item: Element) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(item.get("href") or "")))


def _is_navigation(item: Element) -> bool:
    return "nav" in (item.get("properties") or "").split()


def _facts(contents: Element) -> dict[str, str]:
    found: dict[str, list[str]] = {name: [] for name in _FACTS.values()}
    for element in contents.iter("{http://purl.org/dc/elements/1.1/}*"):
        value = _all_text(element)
        if value and local_name(element) in _FACTS:
            found[_FACTS[local_name(element)]].append(value)
    facts = {name: "; ".join(values) if name == "author" else "".join(values[:1]) for name, values in found.items()}
    return facts_of({**facts, "date": date_of(facts["date"])})


def _chapter(archive: zipfile.ZipFile, name: str, media_type: str) -> list[Block]:
    try:
        data = archive.read(name)
    except KeyError:
        raise ExtractionError("missing", "the book has no such file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ExtractionError("damaged", f"it cannot be unpacked: {error}") from None
    if media_type not in _PAGES:
        raise ExtractionError("unsupported", f"a chapter of type {media_type or 'unknown'} is not read")
    return blocks_of(data)


def _titles(archive: zipfile.ZipFile, tables: set[str]) -> dict[str, str]:
    """Returns the chapter titles by file, from the tables of contents of EPUB 3 (links) and EPUB 2 (navPoints)."""
    titles: dict[str, str] = {}
    for name in sorted(tables & set(archive.namelist())):
        try:
            root = _xml(archive, name)
        except ExtractionError:
            # A book without a table of contents is still complete.
            continue
        entries = [(link.get("href"), link) for link in root.iter("{http://www.w3.org/1999/xhtml}a")]
        for point in root.iter("{*}navPoint"):
            target, label = point.find("{*}content"), point.find("{*}navLabel")
            if target is not None and label is not None:
                entries.append((target.get("src"), label))
        for target, label in entries:
            path = unquote((target or "").partition("#")[0])
            file = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            titles.setdefault(file, _short(_all_text(label)))
    return titles


def _all_text(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def _short(title: str) -> str:
    return title if len(title) <= _LONGEST_TITLE else ""


def _xml(archive: zipfile.ZipFile, name: str) -> Element:
    return parse_xml(name, archive.read(name))
