"""Presentations (pptx) as Markdown: slide by slide the title, the text, tables, figures of charts, and speaker notes.

Left out are comments, and what stands on every slide: numbers, dates and feet.
"""

from __future__ import annotations

from collections.abc import Iterator

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import join
from sheepop.data.extract.office_parts import Element, OfficeParts, local_name
from sheepop.data.extract.slide_frames import chart_table, diagram_items, table_of
from sheepop.data.extract.slide_text import A, lines, paragraphs
from sheepop.data.extract.zip_safety import office_package

P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_TITLES = frozenset({"title", "ctrTitle"})
_ON_EVERY_SLIDE = frozenset({"sldNum", "dt", "ftr", "hdr"})
# Placeholders whose paragraphs have bullets unless they say otherwise.
_BULLETED = frozenset({"body", "obj"})
_NO = ("0", "false")

Blocks = list[tuple[str, str]]


def extract_pptx(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose with a mark ``slide N`` for each slide.

    Metadata: ``title``, ``author`` and ``date`` where the file states them, and ``hidden_slides``, the numbers of the
    slides that are not shown, which are included. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        text, marks, hidden = "", [], []
        for number, name in enumerate(_slide_names(parts), 1):
            slide = parts.xml(name)
            body = join(_slide_blocks(parts, name, slide))
            hidden += [str(number)] if slide.get("show") in _NO else []
            if body:
                text += "\n\n" if text else ""
                marks.append((len(text), f"slide {number}"))
                text += body
        if not text:
            raise ExtractionError("empty", "the slides have no text")
        facts = parts.properties()
        if hidden:
            facts["hidden_slides"] = ", ".join(hidden)
        yield Extracted(text, marks=tuple(marks), metadata=facts)


def _slide_names(parts: OfficeParts) -> list[str]:
    slides = parts.xml(parts.main).iterfind(f"{P}sldIdLst/{P}sldId")
    names = [parts.target(parts.main, slide.get(f"{_R}id") or "") for slide in slides]
    missing = [number for number, name in enumerate(names, 1) if name is None]
    if missing:
        raise ExtractionError("damaged", f"slide {missing[0]} is not in the package")
    return [name for name in names if name]


def _slide_blocks(parts: OfficeParts, name: str, slide: Element) -> Blocks:
    shapes = list(_shapes(slide.find(f"{P}cSld/{P}spTree")))
    titles = [shape for shape in shapes if _placeholder(shape) in _TITLES]
    blocks: Blocks = []
    for title in titles:
        text = " ".join(line for _, line in lines(title)).strip()
        blocks += [("heading", f"# {text}")] if text else []
    for shape in shapes:
        if shape not in titles:
            blocks += _shape_blocks(parts, name, shape)
    notes = [text for part in parts.related(name, "notesSlide") for text in _notes(parts, part)]
    return [*blocks, ("text", "\n".join(["Notes:", *notes]))] if notes else blocks


def _shapes(tree: Element | None) -> Iterator[Element]:
    """The shapes in the order in which they are drawn, those of groups in their place."""
    for shape in () if tree is None else tree:
        name = local_name(shape)
        if name == "grpSp":
            yield from _shapes(shape)
        elif name == "AlternateContent":
            # The first alternative is the newest form of the same.
            yield from _shapes(shape[0] if len(shape) else None)
        elif name in ("sp", "graphicFrame", "cxnSp"):
            yield shape


def _placeholder(shape: Element) -> str | None:
    """The kind of placeholder that a shape fills, None when it fills none."""
    placeholder = shape.find(f"*/{P}nvPr/{P}ph")
    return None if placeholder is None else placeholder.get("type") or "obj"


def _shape_blocks(parts: OfficeParts, slide: str, shape: Element) -> Blocks:
    placeholder = _placeholder(shape)
    if placeholder in _ON_EVERY_SLIDE:
        return []
    if local_name(shape) != "graphicFrame":
        return paragraphs(shape, bulleted=placeholder in _BULLETED)
    table = shape.find(f".//{A}tbl")
    if table is not None:
        return _block("table", table_of(table))
    chart = shape.find(f".//{_CHART}")
    if chart is not None:
        part = parts.target(slide, chart.get(f"{_R}id") or "")
        return _block("table", chart_table(parts.xml(part))) if part else []
    diagram = shape.find(f".//{_DIAGRAM}")
    if diagram is not None:
        part = parts.target(slide, diagram.get(f"{_R}dm") or "")
        return [("item", f"- {text}") for text in diagram_items(parts.xml(part))] if part else []
    return []


def _notes(parts: OfficeParts, part: str) -> list[str]:
    """The paragraphs that the speaker wrote below the slide."""
    tree = parts.xml(part).find(f"{P}cSld/{P}spTree")
    bodies = [shape for shape in _shapes(tree) if _placeholder(shape) == "body"]
    return [line.strip() for body in bodies for _, line in lines(body) if line.strip()]


def _block(kind: str, text: str) -> Blocks:
    return [(kind, text)] if text else []
