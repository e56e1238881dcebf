"""Metrics of an imagined run, and a reader of pages that knows nothing of how they were written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.figure import Figure

from sheepop.report.charts import Chart

VOID = {"meta", "link", "img", "br", "hr", "input"}


def of_plotly(make: Callable[..., Chart]) -> Callable[..., Any]:
    """The chart that a function makes, as Plotly's own object, which refuses what Plotly does not know."""
    from plotly.graph_objects import Figure as PlotlyFigure

    def made(*arguments: Any, **options: Any) -> Any:
        chart = make(*arguments, **options)
        return PlotlyFigure(json.loads(json.dumps(chart.data)), chart.layout)

    return made


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class ParsedPage(HTMLParser):
    """Elements with all text below them, in the order they open; `unclosed` names what does not nest."""

    elements: list[Element] = field(default_factory=list)
    unclosed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop().tag != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def close(self) -> None:
        super().close()
        self.unclosed += [element.tag for element in self._open]

    def find(self, tag: str, css_class: str | None = None) -> list[Element]:
        return [
            element
            for element in self.elements
            if element.tag == tag
            and (css_class is None or css_class in (element.attributes.get("class") or "").split())
        ]

    def charts(self) -> list[dict[str, Any]]:
        data = [script.text for script in self.find("script") if script.attributes.get("type") == "application/json"]
        return [json.loads(text) for text in data]


def assert_all_is_in_its_place(figure: Figure) -> None:
    """Titles, labels and legends are whole, and none covers another panel."""
    renderer = figure.canvas.get_renderer()
    boxes = [part.get_tightbbox(renderer) for part in (*figure.axes, *figure.legends)]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, box
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, box
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)


@pytest.fixture(scope="session")
def parse():
    def parse_page(text: str) -> ParsedPage:
        page = ParsedPage()
        page.feed(text)
        page.close()
        return page

    return parse_page


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, 410, 10):
        row = {"step": step, "split": "train", "loss": 2 + 60 / step, "learning_rate": step * 1e-5}
        rows.append({**row, "grad_norm": 1 / step, "tokens": step * 512, "tokens_per_second": 1000.0 + step})
        if step % 100 == 0:
            rows.append({"step": step, "split": "validation", "loss": 2.5 + 50 / step, "bits_per_byte": 1 + 9 / step})
    rows[4]["loss"] = None
    return rows
