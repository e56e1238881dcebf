"""Turns presentations (pptx) into Markdown: for each slide its title, text, tables, chart data and speaker notes.

Comments, slide numbers, dates, headers and footers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from sheepop.data.extract.archive import office_package
from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError
from sheepop.data.extract.markdown import heading, item, one_line, table
from sheepop.data.extract.office_parts import (
    Blocks,
    Element,
    OfficeParts,
    formula,
    integer,
    local_name,
    presentation,
    unescaped,
    with_notes,
)
from sheepop.data.extract.word import count, numeral

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_D = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_TITLES = frozenset({"title", "ctrTitle"})
_ON_EVERY_SLIDE = frozenset({"sldNum", "dt", "ftr", "hdr"})
# Placeholders whose paragraphs have bullets by default.
_BULLETED = frozenset({"body", "obj"})
_NO, _YES = ("0", "false"), ("1", "true")
_DEEPEST_LEVEL = 8
# Number formats: the beginning of the name in presentations, and the name in Word.
_NUMERALS = {"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman", "romanUc": "upperRoman"}
# The elements that give the bullet or number of a paragraph.
_BULLETS = frozenset({"buNone", "buChar", "buAutoNum", "buBlip"})


def extract_pptx(content: Content, context: Context) -> Documents:
    """Yields one document of prose with a mark ``slide N`` for each slide.

    Metadata: ``title``, ``author``, ``language`` and ``date`` if the file states them, and ``hidden_slides``, the
    numbers of hidden slides, which are included. Raises `ExtractionError`.
    """
    with office_package(content, context) as archive:
        parts = OfficeParts(archive)
        slides = [(name, parts.xml(name)) for name in _slide_names(parts)]
        hidden = [str(number) for number, (_, slide) in enumerate(slides, 1) if slide.get("show") in _NO]
        facts = parts.properties() | ({"hidden_slides": ", ".join(hidden)} if hidden else {})
        yield presentation((_slide_blocks(parts, name, slide) for name, slide in slides), facts)


def _slide_names(parts: OfficeParts) -> list[str]:
    slides = parts.xml(parts.main).iterfind(f"{_P}sldIdLst/{_P}sldId")
    names = [parts.target(parts.main, slide.get(f"{_R}id") or "") for slide in slides]
    missing = [number for number, name in enumerate(names, 1) if name is None]
    if missing:
        raise ExtractionError("damaged", f"slide {missing[0]} is not in the package")
    return [name for name in names if name]


def _slide_blocks(parts: OfficeParts, name: str, slide: Element) -> Blocks:
    shapes = list(_shapes(slide.find(f"{_P}cSld/{_P}spTree")))
    titles = [shape for shape in shapes if _placeholder(shape) in _TITLES]
    blocks = [("heading", heading(1, one_line(_lines(title)))) for title in titles]
    for shape in shapes:
        blocks += [] if shape in titles else _shape_blocks(parts, name, shape)
    return with_notes(blocks, [text for part in parts.related(name, "notesSlide") for text in _notes(parts, part)])


def _shapes(tree: Element | None) -> Iterator[Element]:
    """Yields the shapes in drawing order, including those in groups."""
    for shape in () if tree is None else tree:
        name = local_name(shape)
        if name == "grpSp":
            yield from _shapes(shape)
        elif name == "AlternateContent":
            # The first alternative is the newest form of the same content.
            yield from _shapes(shape[0] if len(shape) else None)
        elif name in ("sp", "graphicFrame", "cxnSp"):
            yield shape


def _placeholder(shape: Element) -> str | None:
    """Returns the kind of placeholder that a shape fills, or None if it fills none."""
    placeholder = shape.find(f"*/{_P}nvPr/{_P}ph")
    return None if placeholder is None else placeholder.get("type") or "obj"


def _shape_blocks(parts: OfficeParts, slide: str, shape: Element) -> Blocks:
    placeholder = _placeholder(shape)
    if placeholder in _ON_EVERY_SLIDE:
        return []
    if local_name(shape) != "graphicFrame":
        return _paragraphs(shape, bulleted=placeholder in _BULLETED)
    for grid in shape.iter(f"{_A}tbl"):
        return [("table", _table_of(grid))]
    for chart in shape.iter(f"{_C}chart"):
        part = parts.target(slide, chart.get(f"{_R}id") or "")
        return [("table", _chart_table(parts.xml(part)))] if part else []
    for diagram in shape.iter(f"{_D}relIds"):
        part = parts.target(slide, diagram.get(f"{_R}dm") or "")
        texts = [one_line(_lines(point)) for point in parts.xml(part).iter(f"{_D}t")] if part else []
        return [("item", item(0, "-", " ".join(text.split()))) for text in texts if text.strip()]
    return []


def _notes(parts: OfficeParts, part: str) -> list[str]:
    """Returns the paragraphs of the speaker notes."""
    tree = parts.xml(part).find(f"{_P}cSld/{_P}spTree")
    bodies = [shape for shape in _shapes(tree) if _placeholder(shape) == "body"]
    return [line.strip() for body in bodies for _, line in _lines(body) if line.strip()]


def _table_of(element: Element) -> str:
    """Returns a table of a slide as Markdown; a merged cell fills its first place and leaves the others empty."""
    rows = [row.findall(f"{_A}tc") for row in element.findall(f"{_A}tr")]
    return table(
        ["" if cell.get("hMerge") in _YES or cell.get("vMerge") in _YES else one_line(_lines(cell)) for cell in row]
        for row in rows
    )


def _chart_table(chart: Element) -> str:
    """Returns the title of a chart and its data, with a row for each category and a column for each series."""
    title = chart.find(f"{_C}chart/{_C}title")
    heading = "" if title is None else " ".join(text.text or "" for text in title.iter(f"{_A}t"))
    series = list(chart.iter(f"{_C}ser"))
    columns = [_points(one, "val") or _points(one, "yVal") for one in series]
    categories: dict[str, str] = {}
    for one in series:
        categories = {**(_points(one, "cat") or _points(one, "xVal")), **categories}
    order = sorted(set(categories).union(*columns), key=lambda index: (integer(index, 10**9), index))
    rows = [[categories.get(index, ""), *(column.get(index, "") for column in columns)] for index in order]
    return "\n\n".join(part for part in (heading, table([["", *map(_name, series)], *rows])) if part)


def _points(series: Element, kind: str) -> dict[str, str]:
    """Returns the data values stored in the chart, by index."""
    points = [point for axis in series.findall(f"{_C}{kind}") for point in axis.iter(f"{_C}pt")]
    return {point.get("idx") or "": point.findtext(f"{_C}v") or "" for point in points}


def _name(series: Element) -> str:
    name = series.find(f"{_C}tx")
    return "" if name is None else " ".join(value.text or "" for value in name.iter(f"{_C}v"))


def _lines(shape: Element) -> list[tuple[str, str]]:
    """Returns the paragraphs of a shape as blocks; line breaks are kept."""
    return [("text", _text(paragraph)) for paragraph in shape.iter(f"{_A}p")]


def _paragraphs(shape: Element, *, bulleted: bool) -> Blocks:
    """Returns the paragraphs of a shape as text or item blocks; `bulleted` says whether bullets are the default."""
    found = [(paragraph, text) for paragraph in shape.iter(f"{_A}p") if (text := _text(paragraph).strip())]
    counts: dict[int, int] = {}
    blocks: Blocks = []
    for paragraph, text in found:
        properties = paragraph.find(f"{_A}pPr")
        level = 0 if properties is None else integer(properties.get("lvl"), 0, _DEEPEST_LEVEL)
        label = _label(properties, level, counts, bulleted=bulleted and len(found) > 1)
        blocks.append(("item", item(level, label, text)) if label else ("text", text))
    return blocks


def _text(paragraph: Element) -> str:
    return "".join(map(_piece, paragraph))


def _piece(element: Element) -> str:
    name = local_name(element)
    if name in ("r", "fld"):
        return "".join(unescaped(text.text or "") for text in element.findall(f"{_A}t"))
    if name == "br":
        return "\n"
    if name == "AlternateContent":
        return "".join(map(_piece, element[0])) if len(element) else ""
    # A formula may be wrapped in a14:m.
    return formula(element) if name in ("m", "oMath", "oMathPara") else ""


def _label(properties: Element | None, level: int, counts: dict[int, int], *, bulleted: bool) -> str:
    """Returns the bullet or number of a paragraph, or an empty string; `counts` has the last number of each level."""
    bullets = [child for child in (() if properties is None else properties) if local_name(child) in _BULLETS]
    kind = local_name(bullets[0]) if bullets else "buChar" if bulleted else "buNone"
    if kind == "buAutoNum":
        number = count(counts, level, integer(bullets[0].get("startAt"), 1))
        way = bullets[0].get("type") or ""
        text = numeral(number, _NUMERALS.get(way[:7], "decimal"))
        return f"({text})" if way.endswith("ParenBoth") else f"{text})" if way.endswith("ParenR") else f"{text}."
    for ended in [at for at in counts if at >= level]:
        del counts[ended]
    return "" if kind == "buNone" else "-"
