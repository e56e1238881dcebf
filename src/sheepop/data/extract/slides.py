"""Presentations (pptx) as Markdown: slide by slide the title, the text, tables, figures of charts, and speaker notes.

Left out are comments, and what stands on every slide: numbers, dates and feet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.markdown import join, marked, table
from sheepop.data.extract.office_math import formula
from sheepop.data.extract.office_parts import Element, OfficeParts, local_name
from sheepop.data.extract.zip_safety import office_package

A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_D = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}"
P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}chart"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_TITLES = frozenset({"title", "ctrTitle"})
_ON_EVERY_SLIDE = frozenset({"sldNum", "dt", "ftr", "hdr"})
# Placeholders whose paragraphs have bullets unless they say otherwise.
_BULLETED = frozenset({"body", "obj"})
_NO, _YES = ("0", "false"), ("1", "true")
_DEEPEST_LEVEL = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# How a paragraph says what stands in front of it.
_BULLETS = frozenset({"buNone", "buChar", "buAutoNum", "buBlip"})

Blocks = list[tuple[str, str]]


def extract_pptx(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose with a mark ``slide N`` for each slide.

    Metadata: ``title``, ``author`` and ``date`` where the file states them, and ``hidden_slides``, the numbers of the
    slides that are not shown, which are included. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        slides = [(name, parts.xml(name)) for name in _slide_names(parts)]
        text, marks = marked(
            (f"slide {number}", join(_slide_blocks(parts, name, slide)))
            for number, (name, slide) in enumerate(slides, 1)
        )
        hidden = [str(number) for number, (_, slide) in enumerate(slides, 1) if slide.get("show") in _NO]
        if not text:
            raise ExtractionError("empty", "the slides have no text")
        facts = parts.properties()
        if hidden:
            facts["hidden_slides"] = ", ".join(hidden)
        yield Extracted(text, marks=marks, metadata=facts)


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
        text = " ".join(line for _, line in _lines(title)).strip()
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
        return _paragraphs(shape, bulleted=placeholder in _BULLETED)
    grid = shape.find(f".//{A}tbl")
    if grid is not None:
        return _block("table", _table_of(grid))
    chart = shape.find(f".//{_CHART}")
    if chart is not None:
        part = parts.target(slide, chart.get(f"{_R}id") or "")
        return _block("table", _chart_table(parts.xml(part))) if part else []
    diagram = shape.find(f".//{_DIAGRAM}")
    if diagram is not None:
        part = parts.target(slide, diagram.get(f"{_R}dm") or "")
        return [("item", f"- {text}") for text in _diagram_items(parts.xml(part))] if part else []
    return []


def _notes(parts: OfficeParts, part: str) -> list[str]:
    """The paragraphs that the speaker wrote below the slide."""
    tree = parts.xml(part).find(f"{P}cSld/{P}spTree")
    bodies = [shape for shape in _shapes(tree) if _placeholder(shape) == "body"]
    return [line.strip() for body in bodies for _, line in _lines(body) if line.strip()]


def _block(kind: str, text: str) -> Blocks:
    return [(kind, text)] if text else []


def _table_of(element: Element) -> str:
    """A table on a slide as Markdown; the places that a merged cell covers beside its first stay empty."""
    rows = []
    for row in element.findall(f"{A}tr"):
        cells = row.findall(f"{A}tc")
        rows.append(["" if _is_covered(cell) else " ".join(text for _, text in _lines(cell)) for cell in cells])
    return table(rows)


def _chart_table(chart: Element) -> str:
    """The title of a chart, and its figures: a row for each category, a column for each series."""
    title = chart.find(f"{_C}chart/{_C}title")
    heading = "" if title is None else " ".join(text.text or "" for text in title.iter(f"{A}t"))
    series = list(chart.iter(f"{_C}ser"))
    columns = [_points(one, "val") or _points(one, "yVal") for one in series]
    categories: dict[str, str] = {}
    for one in series:
        categories = {**(_points(one, "cat") or _points(one, "xVal")), **categories}
    order = sorted({index for column in (categories, *columns) for index in column}, key=_by_number)
    rows = [[categories.get(index, ""), *(column.get(index, "") for column in columns)] for index in order]
    figures = table([["", *map(_name, series)], *rows])
    return "\n\n".join(part for part in (heading, figures) if part)


def _diagram_items(diagram: Element) -> list[str]:
    """The text of each point of a diagram."""
    texts = (" ".join(text for _, text in _lines(point)) for point in diagram.iter(f"{_D}t"))
    return [" ".join(text.split()) for text in texts if text.strip()]


def _is_covered(cell: Element) -> bool:
    return cell.get("hMerge") in _YES or cell.get("vMerge") in _YES


def _points(series: Element, kind: str) -> dict[str, str]:
    """The values that the chart keeps of its data, by their index."""
    points = [point for axis in series.findall(f"{_C}{kind}") for point in axis.iter(f"{_C}pt")]
    return {point.get("idx") or "": point.findtext(f"{_C}v") or "" for point in points}


def _name(series: Element) -> str:
    name = series.find(f"{_C}tx")
    return "" if name is None else " ".join(value.text or "" for value in name.iter(f"{_C}v"))


def _by_number(index: str) -> tuple[int, str]:
    return (int(index) if index.isascii() and index.isdigit() and len(index) < 10 else 10**9, index)


def _lines(shape: Element) -> list[tuple[Element, str]]:
    """The paragraphs in a shape with the text of each; a line break in one is a line break in the text."""
    return [(paragraph, _text(paragraph)) for paragraph in shape.iter(f"{A}p")]


def _paragraphs(shape: Element, *, bulleted: bool) -> list[tuple[str, str]]:
    """The paragraphs as blocks, kind and text; `bulleted` tells whether they have bullets unless they say otherwise."""
    found = [(paragraph, text.strip()) for paragraph, text in _lines(shape) if text.strip()]
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
