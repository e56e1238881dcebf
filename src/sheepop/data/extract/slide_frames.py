"""What frames on a slide hold: tables, the figures behind charts, and the text of diagrams (SmartArt)."""

from __future__ import annotations

from sheepop.data.extract.markdown import table
from sheepop.data.extract.office_parts import Element
from sheepop.data.extract.slide_text import A, lines

_C = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_D = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}"
_YES = ("1", "true")


def table_of(element: Element) -> str:
    """A table on a slide as Markdown; the places that a merged cell covers beside its first stay empty."""
    rows = []
    for row in element.findall(f"{A}tr"):
        cells = row.findall(f"{A}tc")
        rows.append(["" if _is_covered(cell) else " ".join(text for _, text in lines(cell)) for cell in cells])
    return table(rows)


def chart_table(chart: Element) -> str:
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


def diagram_items(diagram: Element) -> list[str]:
    """The text of each point of a diagram."""
    texts = (" ".join(text for _, text in lines(point)) for point in diagram.iter(f"{_D}t"))
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
