"""Files of old office programs: Word and PowerPoint before 2007 (doc, ppt) and Rich Text (rtf), as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import join, marked, table

Blocks = list[tuple[str, str]]

# The library leaves notes out; without their mark they stand in the sentence.
_NOTE = re.compile(r"\{\\\*?\s*\\footnote\b")
_FACTS = {"title": "title", "author": "author", "created": "date"}
_DATE_LENGTH = len("2024-01-31")
_DEEPEST_HEADING = 6


def extract_doc(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose: headings, paragraphs, items (numbers are not known), tables and notes.

    Metadata: ``title``, ``author`` and ``date`` where the file states them. Raises `ExtractionError`.
    """
    known = _known(content, "doc")
    text = join([block for section in known["sections"] for block in _blocks(section)])
    if not text:
        raise ExtractionError("empty", "the document has no text")
    yield Extracted(text, metadata=_facts(known))


def extract_ppt(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose with a mark ``slide N`` for each slide, and its speaker notes; raises `ExtractionError`."""
    known = _known(content, "ppt")
    text, marks = marked((f"slide {n}", join(_blocks(section))) for n, section in enumerate(known["sections"], 1))
    if not text:
        raise ExtractionError("empty", "the slides have no text")
    yield Extracted(text, marks=marks, metadata=_facts(known))


def extract_rtf(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose: the paragraphs, with the cells of a row between pipes; raises `ExtractionError`."""
    from striprtf.striprtf import rtf_to_text

    with content.open() as file:
        # What is not ASCII is escaped; bytes that are not stand for themselves in the code page of the file.
        source = _NOTE.sub("{ ", file.read().decode("latin-1"))
    text = rtf_to_text(source, errors="replace")
    if not text.strip():
        raise ExtractionError("empty", "the document has no text")
    yield Extracted(text.strip("\n"))


def _known(content: Content, kind: Literal["doc", "ppt"]) -> dict[str, Any]:
    """What the library makes of a file, as plain data."""
    from office_oxide import Document, OfficeOxideError

    with content.open() as file:
        try:
            found: dict[str, Any] = json.loads(Document.from_bytes(file.read(), kind).to_ir_json())
        except OfficeOxideError as error:
            is_locked = "encrypt" in str(error).lower() or "password" in str(error).lower()
            raise ExtractionError("encrypted" if is_locked else "damaged", str(error)) from None
    return found


def _facts(known: dict[str, Any]) -> dict[str, str]:
    stated = {fact: " ".join(str(known["metadata"].get(name) or "").split()) for name, fact in _FACTS.items()}
    return {fact: value[:_DATE_LENGTH] if fact == "date" else value for fact, value in stated.items() if value}


def _blocks(section: dict[str, Any]) -> Blocks:
    blocks = [block for element in section["elements"] for block in _element(element)]
    notes = [text for note in section.get("speaker_notes") or [] for _, text in _element(note)]
    return [*blocks, ("text", "\n".join(["Notes:", *notes]))] if notes else blocks


def _element(element: dict[str, Any]) -> Blocks:
    kind = element.get("type")
    if kind == "heading":
        level = min(int(element.get("level", 1)), _DEEPEST_HEADING)
        text = " ".join(_inline(element).split())
        return [("heading", f"{'#' * level} {text}")] if text else []
    if kind == "list":
        return [("item", line) for line in _items(element, 0)]
    if kind == "table":
        rows = [[" ".join(text for _, text in _inside(cell)) for cell in row["cells"]] for row in element["rows"]]
        text = table(rows)
        return [("table", text)] if text else []
    if kind == "paragraph":
        text = _inline(element).strip()
        return [("text", text)] if text else []
    return _inside(element)


def _inside(element: dict[str, Any]) -> Blocks:
    return [block for inner in element.get("content") or [] for block in _element(inner)]


def _items(element: dict[str, Any], level: int) -> Iterator[str]:
    for item in element["items"]:
        text = " ".join(text for _, text in _inside(item))
        if text:
            yield f"{'  ' * level}- {text}"
        if item.get("nested"):
            yield from _items(item["nested"], level + 1)


def _inline(element: dict[str, Any]) -> str:
    """The text of a paragraph, with the lines into which it is broken."""
    pieces = element.get("content") or []
    return "".join("\n" if piece.get("type") == "line_break" else str(piece.get("text", "")) for piece in pieces)
