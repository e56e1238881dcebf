"""Writes an HTML page as a single file, which needs no network and escapes all text."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sheepop.core.files import finite, write_atomic
from sheepop.report.charts import Chart
from sheepop.report.formatting import shown
from sheepop.report.glossary import meaning

# With this policy the browser refuses every request from the page.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_NUMBER = r"[-−]?[0-9][0-9,]*(\.[0-9]+)?(e[-+][0-9]+)?|∞|–"
_PIXELS = 1.5  # pixels of a picture per pixel of the page, so that it is sharp on a high-resolution screen
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n\r"}
_UNPRINTABLE = {
    **_CONTROL_PICTURES,
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD),
}


@dataclass(frozen=True)
class Drawing:
    """A module script that defines a function ``journey(data, chosen, width, on)``, and the style of what it draws."""

    script: str
    style: str


class Page:
    """Collects content from top to bottom; `write` makes the file. All text is untrusted and escaped."""

    def __init__(self, title: str, *, footer: str = "") -> None:
        self.title, self.footer = title, footer
        self._parts: list[str] = []
        self._sections: dict[str, str] = {}
        self._num_charts = self._num_searched = 0
        self._drawing: Drawing | None = None

    def add_section(self, heading: str) -> None:
        """Begins a section with an anchor and a link at the top of the page."""
        base = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        anchor, count = base, 1
        while anchor in self._sections:
            count += 1
            anchor = f"{base}-{count}"
        self._sections[anchor] = heading
        link = f'<a href="#{escaped(anchor)}">{escaped(heading)}</a>'
        self._parts.append(f'</section>\n<section class="named">\n<h2 id="{escaped(anchor)}">{link}</h2>')

    def add_heading(self, text: str) -> None:
        """Adds a heading within a section."""
        self._parts.append(f"<h3>{escaped(text)}</h3>")

    def add_text(self, text: str) -> None:
        """Adds a paragraph of plain text, in which markup is shown as text."""
        self._parts.append(f"<p>{escaped(text)}</p>")

    def add_facts(self, facts: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Adds labels with values; None is shown as a dash."""
        pairs = facts.items() if isinstance(facts, Mapping) else facts
        items = (
            f"<div><dt{_hint(label)}>{escaped(label)}</dt><dd>{escaped(shown(value))}</dd></div>"
            for label, value in pairs
        )
        self._parts.append(f"<dl>{''.join(items)}</dl>")

    def add_table(self, header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        """Adds a table with numbers right-aligned; raises `ValueError` if a row does not have a cell per column."""
        rows = [list(row) for row in rows]
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"a row of {len(row)} cells does not fit a header of {len(header)}: {row!r}")
        styles = [' class="number"' if _is_numeric([row[i] for row in rows]) else "" for i in range(len(header))]
        head = "".join(
            f'<th scope="col"{style}{_hint(name)}>{escaped(name)}</th>'
            for style, name in zip(styles, header, strict=True)
        )
        body = "\n".join(
            "<tr>" + "".join(f"<td{s}>{escaped(shown(c))}</td>" for s, c in zip(styles, row, strict=True)) + "</tr>"
            for row in rows
        )
        title = f'<figcaption class="label">{escaped(caption)}</figcaption>' if caption else ""
        self._parts.append(
            f'<figure class="table">{title}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div></figure>"
        )

    def add_searched_table(self, header: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> None:
        """Adds a table of any length with a search field; it shows the rows that contain all words in the field."""
        self._num_searched += 1
        cells = [[cell.translate(_UNPRINTABLE) for cell in row] for row in rows]
        head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
        self._parts.append(
            f'<figure class="table searched"><figcaption class="label">{escaped(caption)}</figcaption>'
            f'<p><input type="search" placeholder="Search" aria-label="{escaped(caption)}: search"> <output></output>'
            f'</p><div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody></tbody></table></div>'
            f'<script type="application/json">{_script_safe(json.dumps(cells))}</script></figure>'
        )

    def add_bars(self, values: Mapping[str, float], title: str, *, unit: str = "", half: bool = False) -> None:
        """Adds horizontal bars for values of 0 or more, without JavaScript; two `half` ones fit side by side."""
        most = max(values.values(), default=0) or 1
        rows = "".join(
            f'<tr><th scope="row">{escaped(name)}</th><td class="number">{escaped(shown(value))}</td>'
            f'<td class="bar"><span style="width:{100 * value / most:.2f}%"></span></td></tr>'
            for name, value in values.items()
        )
        label = f'<figcaption class="note">{escaped(unit)}</figcaption>' if unit else ""
        self._parts.append(
            f'<figure class="{"bars half" if half else "bars"}"><h3{_hint(title)}>{escaped(title)}</h3>{label}'
            f"<table><tbody>{rows}</tbody></table></figure>"
        )

    def add_chart(self, chart: Chart, title: str, *, note: str = "", half: bool = False) -> None:
        """Adds a chart under a title; two `half` ones are side by side if there is room."""
        self._num_charts += 1
        data = _script_safe(
            json.dumps({"data": chart.data, "layout": chart.layout}, separators=(",", ":"), allow_nan=False)
        )
        below = f'<figcaption class="note">{escaped(note)}</figcaption>' if note else ""
        self._parts.append(
            f'<figure class="{"chart half" if half else "chart"}" aria-label="{escaped(title)}">'
            f'<h3{_hint(title)}>{escaped(title)}</h3><div class="plot"></div><script type="application/json">{data}'
            f"</script>{below}</figure>"
        )

    def add_journey(self, journey: Mapping[str, Any], drawing: Drawing, *, note: str = "") -> None:
        """Adds the picture of a text on its way through a network, which `drawing` draws when the page is opened."""
        self._drawing = drawing
        data = _script_safe(json.dumps(finite(journey), separators=(",", ":"), allow_nan=False))
        below = f'<figcaption class="note">{escaped(note)}</figcaption>' if note else ""
        self._parts.append(
            f'<figure><div class="journey"></div><script type="application/json">{data}</script>{below}</figure>'
        )

    def add_picture(self, png: bytes, description: str) -> None:
        """Adds a PNG, embedded in the page; one that is wider than the page can be scrolled."""
        data = base64.b64encode(png).decode("ascii")
        width = round(int.from_bytes(png[16:20], "big") / _PIXELS)
        self._parts.append(
            f'<figure class="picture"><div class="scroll" tabindex="0"><img src="data:image/png;base64,{data}" '
            f'width="{width}" alt="{escaped(description)}"></div></figure>'
        )

    def add_sample(self, prompt: str, text: str, *, label: str = "", half: bool = False) -> None:
        """Adds a prompt and its continuation, with control characters visible; two `half` ones fit side by side."""
        caption = f'<figcaption class="label">{escaped(label)}</figcaption>' if label else ""
        begin = f'<span class="prompt">{escaped(prompt)}</span>' if prompt else ""
        rest = f'<span class="continuation">{escaped(text)}</span>'
        self._parts.append(
            f'<figure class="{"sample half" if half else "sample"}">{caption}<pre>{begin}{rest}</pre></figure>'
        )

    def add_source(self, text: str, summary: str) -> None:
        """Adds preformatted text such as a configuration file, collapsed under `summary`."""
        self._parts.append(
            f"<details><summary>{escaped(summary)}</summary><pre><code>{escaped(text)}</code></pre></details>"
        )

    def write(self, path: str | Path) -> None:
        """Writes the page to `path` atomically."""
        write_atomic(path, self.to_html())

    def to_html(self) -> str:
        """The whole document, which needs no other file."""
        links = "".join(f'<a href="#{escaped(a)}">{escaped(h)}</a>' for a, h in self._sections.items())
        nav = f'<nav aria-label="Sections">{links}</nav>' if links else ""
        footer = f"<footer>{escaped(self.footer)}</footer>" if self.footer else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escaped(self.title)}</title>\n<style>\n{self._style()}</style>\n</head>\n<body>\n"
            f"<header><h1>{escaped(self.title)}</h1>{nav}</header>\n<main>\n<section>\n"
            + "\n".join(self._parts)
            + f"\n</section>\n</main>\n{footer}\n{self._scripts()}</body>\n</html>\n"
        )

    def _style(self) -> str:
        """The rules of the page, after those of the drawing, which has the colours of its own page."""
        return ("" if self._drawing is None else self._drawing.style) + _resource("page.css")

    def _scripts(self) -> str:
        """The JavaScript that the page needs for its charts, search tables and drawings."""
        if self._num_charts + self._num_searched == 0 and self._drawing is None:
            return ""
        found = "<noscript><p>JavaScript is off, so the charts and search tables are empty.</p></noscript>\n"
        if self._drawing is not None:
            found += f'<script type="module">\n{self._drawing.script}{_resource("journeys.js")}</script>\n'
        if self._num_charts:
            plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
            found += f"<script>{plotly}</script>\n<script>\n{_resource('charts.js')}</script>\n"
        if self._num_searched:
            found += f"<script>\n{_resource('searched.js')}</script>\n"
        return found


def escaped(text: str) -> str:
    """Escapes text for any place in HTML, and replaces characters that HTML or UTF-8 cannot represent."""
    return html.escape(text.translate(_UNPRINTABLE))


def _script_safe(data: str) -> str:
    """Escapes JSON so that it cannot end the script element that contains it."""
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column has only numbers, formatted numbers, and None, and at least one number."""
    found = [value for value in values if value is not None]
    is_number = (isinstance(v, int | float | str) and re.fullmatch(_NUMBER, shown(v)) is not None for v in found)
    return bool(found) and all(is_number)


def _resource(name: str) -> str:
    return files("sheepop.report").joinpath(name).read_text(encoding="utf-8")


def _hint(label: str) -> str:
    """The title attribute that explains a term of the glossary on hover, or "" for other labels."""
    found = meaning(label)
    return "" if found is None else f' title="{escaped(found)}"'
