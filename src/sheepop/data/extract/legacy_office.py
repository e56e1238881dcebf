"""Turns files of Word and PowerPoint before 2007 (doc, ppt) and Rich Text (rtf) into Markdown."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError
from sheepop.data.extract.markdown import date_of, facts_of, heading, join, one_line, table
from sheepop.data.extract.office_parts import Blocks, document, presentation, with_notes

NEVER = 1601
"""The year of a time that is not set in a Windows file."""
# What counts as written before a compressed text ([MS-OXRTFCP] 2.1.3.1.4).
_RTF_DICTIONARY = (
    rb"{\rtf1\ansi\mac\deff0\deftab720{\fonttbl;}{\f0\fnil \froman \fswiss \fmodern \fscript \fdecor "
    rb"MS Sans SerifSymbolArialTimes New RomanCourier{\colortbl\red0\green0\blue0"
    b"\r\n\\par \\pard\\plain\\f0\\fs20\\b\\i\\u\\tab\\tx"
)
# The library drops notes; removing their mark keeps their text in the sentence.
_NOTE = re.compile(r"\{(?:\\\*)?\s*\\footnote\b")
_NOTE_NUMBER = re.compile(r"\\chftn\b ?")
_HIDES = re.compile(r"\\v(0|1)?(?![a-z0-9]) ?")
_RTF_TOKEN = re.compile(r"\\[a-zA-Z]+-?\d* ?|\\[^a-zA-Z]|[{}]|[^\\{}]+", re.DOTALL)

# Records of PowerPoint: version and instance, type, length ([MS-PPT] 2.3.1, 2.13.24).
_RECORD = struct.Struct("<HHI")
_DOCUMENT, _NOTES_ATOM, _SLIDE_PERSIST, _SLIDE_LIST, _PERSIST_DIRECTORY, _USER_EDIT = 1000, 1009, 1011, 4080, 6002, 4085
_OUTLINE_TEXT, _TEXT_KIND = 3998, 3999
_TEXTS = {4000: "utf-16-le", 4008: "latin-1"}
_TITLES, _NOTES_TEXT = (0, 6), 2  # [MS-PPT] 2.13.33
_SUMMARY = "\x05SummaryInformation"
_PLAIN_USER_EDIT_BYTES = 28  # one that states an encryption is longer


def extract_doc(content: Content, context: Context) -> Documents:
    """Yields one document of prose: headings, paragraphs, items (their numbers are unknown), tables and notes.

    Metadata: ``title``, ``author`` and ``date`` if the file states them. Raises `ExtractionError`.
    """
    known = _known(content)
    yield document(join(block for section in known["sections"] for block in _blocks(section)), _facts(known))


def extract_ppt(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark ``slide N`` and the notes of each slide; raises `ExtractionError`."""
    from olefile import OleFileIO

    with content.open() as file:
        try:
            opened = OleFileIO(file)
            current = opened.openstream("Current User").read() if opened.exists("Current User") else b""
            data, facts = opened.openstream("PowerPoint Document").read(), _stated(opened)
        except OSError as error:  # olefile's for what is no stream
            raise ExtractionError("damaged", str(error)) from None
    yield presentation(_Slides(data, int.from_bytes(current[16:20], "little")).blocks(), facts)


def extract_rtf(content: Content, context: Context) -> Documents:
    """Yields one document of prose: paragraphs, and table rows with pipes between cells; raises `ExtractionError`."""
    text, hidden = rich_text(content.read())
    yield document(text, {"hidden_characters": str(hidden)} if hidden else {})


def rich_text(data: bytes) -> tuple[str, int]:
    """Returns the text of RTF, and the number of hidden characters that were left out."""
    from striprtf.striprtf import rtf_to_text

    # RTF escapes characters outside ASCII; striprtf decodes raw bytes with the code page of the file.
    written, hidden = _without_hidden(_NOTE_NUMBER.sub("", _NOTE.sub("{ ", data.decode("latin-1"))))
    text = rtf_to_text(written, errors="replace")
    return (text.strip("\n") if text.strip() else ""), hidden


def unpacked_rtf(data: bytes) -> bytes:
    """Returns the RTF in the compressed body of an Outlook message ([MS-OXRTFCP] 3.1.4); raises `ExtractionError`."""
    length, kind = int.from_bytes(data[4:8], "little"), data[8:12]
    if kind == b"MELA":
        return data[16 : 16 + length]
    if kind != b"LZFu":
        raise ExtractionError("damaged", "its compressed text has an unknown form")
    written, at = bytearray(_RTF_DICTIONARY), 16
    while at < len(data):
        flags, at = data[at], at + 1
        for bit in range(8):
            if not flags >> bit & 1:
                written += data[at : at + 1]
                at += 1
                continue
            reference, at = int.from_bytes(data[at : at + 2], "big"), at + 2
            # A place in the last 4096 bytes; the place to write next marks the end.
            back = (len(written) - (reference >> 4)) % 4096
            if back == 0 or at > len(data):
                return bytes(written[len(_RTF_DICTIONARY) :])
            for _ in range((reference & 15) + 2):
                written.append(written[-back] if back <= len(written) else 32)
    return bytes(written[len(_RTF_DICTIONARY) :])


def _without_hidden(written: str) -> tuple[str, int]:
    """Returns RTF without its hidden text, from ``\\v`` to ``\\v0`` or the end of the group, and the length of that."""
    if not _HIDES.search(written):
        return written, 0
    kept: list[str] = []
    states, hidden = [False], 0
    for token in _RTF_TOKEN.findall(written):
        if token == "{":
            states.append(states[-1])
        elif token == "}" and len(states) > 1:
            states.pop()
        elif match := _HIDES.fullmatch(token):
            states[-1] = match[1] != "0"
        elif token[0] not in "\\{}" and states[-1]:
            hidden += len(token)
            continue
        kept.append(token)
    return "".join(kept), hidden


def _known(content: Content) -> dict[str, Any]:
    """Parses a file with office_oxide and returns its JSON form as plain data."""
    from office_oxide import Document, OfficeOxideError

    try:
        return json.loads(Document.from_bytes(content.read(), "doc").to_ir_json())
    except OfficeOxideError as error:
        is_locked = "encrypt" in str(error).lower() or "password" in str(error).lower()
        raise ExtractionError("encrypted" if is_locked else "damaged", str(error)) from None


def _facts(known: dict[str, Any]) -> dict[str, str]:
    stated = known["metadata"]
    date = date_of(str(stated.get("created") or ""))
    return facts_of({"title": stated.get("title"), "author": stated.get("author"), "date": date})


def _blocks(section: dict[str, Any]) -> Blocks:
    return [block for element in section["elements"] for block in _element(element)]


def _element(element: dict[str, Any], level: int = 0) -> Blocks:
    """Returns an element as blocks; `level` is the depth of a list."""
    kind = element.get("type")
    pieces = element.get("content") or []
    if kind in ("heading", "paragraph"):
        text = "".join("\n" if piece.get("type") == "line_break" else str(piece.get("text", "")) for piece in pieces)
        if kind == "heading":
            return [("heading", heading(int(element.get("level", 1)), text))]
        return [("text", text.strip())]
    if kind == "table":
        return [("table", table([one_line(_inside(cell)) for cell in row["cells"]] for row in element["rows"]))]
    if kind == "list":
        return [block for item in element["items"] for block in _item(item, level)]
    return _inside(element)


def _inside(element: dict[str, Any]) -> Blocks:
    return [block for inner in element.get("content") or [] for block in _element(inner)]


def _item(found: dict[str, Any], level: int) -> Blocks:
    text = one_line(_inside(found))
    nested = found.get("nested")
    blocks = [("item", f"{'  ' * level}- {text}")] if text else []
    return blocks + (_element({"type": "list", **nested}, level + 1) if nested else [])


class _Record(NamedTuple):
    """A record of PowerPoint, with the bytes from `begin` to `end` of the stream as its content."""

    kind: int
    instance: int
    is_container: bool
    begin: int
    end: int


class _Slides:
    """The slides of PowerPoint 97 to 2003, in order, from the stream with all of its records ([MS-PPT] 2.1.2)."""

    def __init__(self, data: bytes, last_edit: int) -> None:
        """`last_edit` is where the stream states the last time that the file was saved."""
        self._data = data
        document, self._places = None, dict[int, int]()
        for record in self._records(0, len(data)):
            if record.kind == _PERSIST_DIRECTORY:
                self._places.update(self._directory(record))
            elif record.kind == _DOCUMENT:
                document = record
        # What was saved later replaces earlier records. In a damaged file the order of the stream has to do.
        edits = list(self._edits(last_edit))
        for edit in reversed(edits):
            self._places.update(self._directory(self._record(self._number(edit.begin + 12))))
        if edits:
            document = self._at(self._number(edits[0].begin + 16)) or document
        if document is None:
            raise ExtractionError("damaged", "it has no list of slides")
        lists = [r for r in self._records(document.begin, document.end) if r.kind == _SLIDE_LIST]
        self._slides, self._of_notes = (
            [r for each in lists if each.instance == instance for r in self._records(each.begin, each.end)]
            for instance in (0, 2)
        )

    def _edits(self, at: int) -> Iterator[_Record]:
        """Yields the records of the times that the file was saved, the last one first; refuses an encrypted file."""
        known = set[int]()
        while at not in known and (record := self._record(at)) and record.kind == _USER_EDIT:
            if record.end - record.begin > _PLAIN_USER_EDIT_BYTES:
                raise ExtractionError("encrypted", "it needs a password")
            yield record
            known.add(at)
            at = self._number(record.begin + 8)

    def blocks(self) -> Iterator[Blocks]:
        """Yields the text and the notes of each slide; a text is in a shape, or a shape names it."""
        notes: dict[int, list[str]] = {}
        for record in self._of_notes:
            of, texts = self._notes(self._number(record.begin))
            notes.setdefault(of, []).extend(texts)
        slides: list[tuple[int, int, list[tuple[int, str]]]] = []
        for record in self._slides:
            if record.kind == _SLIDE_PERSIST:
                slides.append((self._number(record.begin), self._number(record.begin + 12), []))
            elif record.kind == _TEXT_KIND and slides:
                slides[-1][2].append((self._number(record.begin), ""))
            elif record.kind in _TEXTS and slides and slides[-1][2]:
                slides[-1][2][-1] = slides[-1][2][-1][0], self._text(record)
        for place, identifier, listed in slides:
            found = [block for kind, text in self._texts(place, listed) for block in _paragraphs(kind, text)]
            yield with_notes(found, notes.get(identifier, []))

    def _notes(self, place: int) -> tuple[int, list[str]]:
        """Returns the identifier of the slide that the notes at a place belong to, and their paragraphs."""
        record = self._at(place)
        inside = self._records(record.begin, record.end) if record else iter(())
        of = next((self._number(r.begin) for r in inside if r.kind == _NOTES_ATOM), 0)
        texts = [text for kind, text in self._texts(place, []) if kind == _NOTES_TEXT]
        return of, [line for text in texts for _, line in _paragraphs(_NOTES_TEXT, text)]

    def _texts(self, place: int, listed: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Yields the texts, with their kinds, of the slide or the notes at a place; its shapes may name `listed`."""
        record, kind = self._at(place), -1
        for inner in self._inside(record) if record else ():
            if inner.kind == _TEXT_KIND:
                kind = self._number(inner.begin)
            elif inner.kind in _TEXTS:
                yield kind, self._text(inner)
            elif inner.kind == _OUTLINE_TEXT and (number := self._number(inner.begin)) < len(listed):
                yield listed[number]

    def _at(self, place: int) -> _Record | None:
        return self._record(self._places.get(place, len(self._data)))

    def _record(self, begin: int) -> _Record | None:
        return next(self._records(begin, len(self._data)), None)

    def _records(self, begin: int, end: int) -> Iterator[_Record]:
        while begin + _RECORD.size <= end:
            version, kind, length = _RECORD.unpack_from(self._data, begin)
            begin += _RECORD.size
            yield _Record(kind, version >> 4, version & 15 == 15, begin, min(begin + length, end))
            begin += length

    def _inside(self, record: _Record) -> Iterator[_Record]:
        """Yields all records in a container, at any depth."""
        for inner in self._records(record.begin, record.end):
            yield inner
            if inner.is_container:
                yield from self._inside(inner)

    def _directory(self, record: _Record | None) -> Iterator[tuple[int, int]]:
        """Yields (number, offset) of the objects in a persist directory ([MS-PPT] 2.3.4)."""
        at = record.begin if record else 0
        while record and at + 4 <= record.end:
            head, at = self._number(at), at + 4
            for number in range(min(head >> 20, (record.end - at) // 4)):
                yield (head & 0xFFFFF) + number, self._number(at)
                at += 4

    def _number(self, at: int) -> int:
        return int.from_bytes(self._data[at : at + 4], "little")

    def _text(self, record: _Record) -> str:
        return self._data[record.begin : record.end].decode(_TEXTS[record.kind], "replace")


def _paragraphs(kind: int, text: str) -> Blocks:
    """Returns a text as blocks; a lone ``*`` stands for the number of the slide, a date or a foot."""
    if text == "*":
        return []
    if kind in _TITLES:
        return [("heading", heading(1, text.replace("\x0b", " ")))]
    lines = (line.replace("\x0b", "\n").strip() for line in text.split("\r"))
    return [("text", line) for line in lines if line]


def _stated(opened: Any) -> dict[str, str]:
    """Returns the title, author and date that a compound file states ([MS-OLEPS] 2.18.1, [MS-OSHARED] 2.3.3.2.1)."""
    known = opened.getproperties(_SUMMARY, convert_time=True) if opened.exists(_SUMMARY) else {}
    page = (known.get(1) or 1252) & 0xFFFF
    encoding = {10000: "mac_roman", 65001: "utf-8"}.get(page, f"cp{page}")
    try:
        title, author = (
            value.decode(encoding, "replace") if isinstance(value := known.get(key), bytes) else "" for key in (2, 4)
        )
    except LookupError:
        return {}
    created = known.get(12)
    date = created.date().isoformat() if isinstance(created, datetime) and created.year > NEVER else ""
    return facts_of({"title": title, "author": author, "date": date})
