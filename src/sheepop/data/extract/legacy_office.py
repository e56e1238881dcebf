"""Turns files of Word and PowerPoint before 2007 (doc, ppt) and Rich Text (rtf) into Markdown."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError
from sheepop.data.extract.markdown import date_of, facts_of, heading, join, one_line, table
from sheepop.data.extract.office_parts import Blocks, document, presentation, with_notes

# The library drops notes; removing their mark keeps their text in the sentence.
_NOTE = re.compile(r"\{(?:\\\*)?\s*\\footnote\b")
_NOTE_NUMBER = re.compile(r"\\chftn\b ?")
_HIDES = re.compile(r"\\v(0|1)?(?![a-z0-9]) ?")
_RTF_TOKEN = re.compile(r"\\[a-zA-Z]+-?\d* ?|\\[^a-zA-Z]|[{}]|[^\\{}]+", re.DOTALL)


def extract_doc(content: Content, context: Context) -> Documents:
    """Yields one document of prose: headings, paragraphs, items (their numbers are unknown), tables and notes.

    Metadata: ``title``, ``author`` and ``date`` if the file states them. Raises `ExtractionError`.
    """
    known = _known(content, "doc")
    yield document(join(block for section in known["sections"] for block in _blocks(section)), _facts(known))


def extract_ppt(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark ``slide N`` and the notes of each slide; raises `ExtractionError`."""
    known = _known(content, "ppt")
    yield presentation(map(_blocks, known["sections"]), _facts(known))


def extract_rtf(content: Content, context: Context) -> Documents:
    """Yields one document of prose: paragraphs, and table rows with pipes between cells; raises `ExtractionError`."""
    from striprtf.striprtf import rtf_to_text

    # RTF escapes characters outside ASCII; striprtf decodes raw bytes with the code page of the file.
    written, hidden = _without_hidden(_NOTE_NUMBER.sub("", _NOTE.sub("{ ", content.read().decode("latin-1"))))
    text = rtf_to_text(written, errors="replace")
    yield document(text.strip("\n") if text.strip() else "", {"hidden_characters": str(hidden)} if hidden else {})


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


def _known(content: Content, kind: Literal["doc", "ppt"]) -> dict[str, Any]:
    """Parses a file with office_oxide and returns its JSON form as plain data."""
    from office_oxide import Document, OfficeOxideError

    try:
        return json.loads(Document.from_bytes(content.read(), kind).to_ir_json())
    except OfficeOxideError as error:
        is_locked = "encrypt" in str(error).lower() or "password" in str(error).lower()
        raise ExtractionError("encrypted" if is_locked else "damaged", str(error)) from None


def _facts(known: dict[str, Any]) -> dict[str, str]:
    stated = known["metadata"]
    date = date_of(str(stated.get("created") or ""))
    return facts_of({"title": stated.get("title"), "author": stated.get("author"), "date": date})


def _blocks(section: dict[str, Any]) -> Blocks:
    notes = [text for note in section.get("speaker_notes") or [] for _, text in _element(note) if text]
    return with_notes([block for element in section["elements"] for block in _element(element)], notes)


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
