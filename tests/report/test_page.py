from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from sheepop.report import Page, loss_chart, stage_times_chart
from sheepop.report.charts import Chart
from sheepop.report.glossary import GLOSSARY
from sheepop.report.page import escaped

HOSTILE = '</script></pre></title><script>alert(1)</script><img src="https://x.example/" onerror=alert(1)>&amp;\'"'


@pytest.fixture
def full_page(metrics: list[dict[str, Any]]) -> Page:
    page = Page("A run", footer="The end")
    page.add_section("Scores")
    page.add_text("Some text.")
    page.add_heading("Numbers")
    page.add_facts([("Steps", 1200), ("Missing", None)])
    page.add_table(["Name", "Bits"], [("gzip -9", 2.1), ("xz -9", None)], caption="Lower is better")
    page.add_chart(loss_chart(metrics), "Loss", note="By step")
    page.add_chart(stage_times_chart({"Training": 12.0}), "Time", half=True)
    page.add_section("Scores")
    page.add_sample("def f(x):\n\t", "  return x\n\n", label="step 5")
    page.add_source("model:\n  d_model: 64\n", "config.yaml")
    return page


def test_everything_added_is_there_and_nests(full_page: Page, parse: Any) -> None:
    page = parse(full_page.to_html())
    assert page.unclosed == []
    assert [e.text for e in page.find("title") + page.find("h1")] == ["A run", "A run"]
    assert [e.text for e in page.find("dt") + page.find("dd")] == ["Steps", "Missing", "1,200", "–"]
    assert [e.text for e in page.find("th") + page.find("td")] == ["Name", "Bits", "gzip -9", "2.1", "xz -9", "–"]
    assert [e.text for e in page.find("td", "number")] == ["2.1", "–"]
    assert page.find("summary")[0].text == "config.yaml"
    assert page.find("code")[0].text == "model:\n  d_model: 64\n"
    assert page.find("footer")[0].text == "The end"


def test_the_header_of_a_table_explains_the_terms_that_the_glossary_has(parse: Any) -> None:
    page = Page("A run")
    page.add_table(["Predictor", "Bits per byte"], [("gzip -9", 2.1)])
    predictor, bits = parse(page.to_html()).find("th")
    assert bits.attributes["title"] == GLOSSARY["Bits per byte"]
    assert "title" not in predictor.attributes


def test_sections_are_reachable(full_page: Page, parse: Any) -> None:
    page = parse(full_page.to_html())
    ids = [element.attributes["id"] for element in page.find("h2")]
    assert ids == ["scores", "scores-2"]
    links = {element.attributes["href"] for element in page.find("a")}
    assert links == {"#scores", "#scores-2"}


def test_sample_keeps_whitespace_and_sets_the_prompt_apart(full_page: Page, parse: Any) -> None:
    page = parse(full_page.to_html())
    assert page.find("span", "prompt")[0].text == "def f(x):\n\t"
    assert page.find("span", "continuation")[0].text == "  return x\n\n"
    style = page.find("style")[0].text
    assert re.search(r"pre \{[^}]*white-space: pre-wrap", style)
    assert re.search(r"\.prompt \{[^}]*background", style)


def test_charts_hold_their_data(full_page: Page, parse: Any, metrics: list[dict[str, Any]]) -> None:
    loss, time = parse(full_page.to_html()).charts()
    assert loss["data"][0]["y"] == [row["loss"] for row in metrics if row["split"] == "train"]
    assert loss["data"][0]["x"] == [row["step"] for row in metrics if row["split"] == "train"]
    assert time["data"][0]["x"] == [12.0]


def test_nothing_is_asked_of_the_network(full_page: Page, parse: Any) -> None:
    page = parse(full_page.to_html())
    assert not [e for e in page.elements if e.tag in ("link", "img", "iframe", "base", "object", "embed", "form")]
    for element in page.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (element.attributes.get(name) or "#").startswith("#")
    style = page.find("style")[0].text
    assert "@import" not in style
    assert "url(" not in style
    policy = next(e.attributes["content"] for e in page.find("meta") if "http-equiv" in e.attributes)
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_plotly_stands_on_the_page_once_and_only_where_needed(full_page: Page, parse: Any) -> None:
    scripts = [element.text for element in parse(full_page.to_html()).find("script")]
    assert scripts.count(get_plotlyjs()) == 1
    assert sum("plotly.js v" in text for text in scripts) == 1
    plain = Page("Words only")
    plain.add_text("No charts.")
    page = parse(plain.to_html())
    assert page.unclosed == []
    assert page.find("script") == []


def test_bars_are_as_long_as_their_values(parse: Any) -> None:
    page = Page("A corpus")
    page.add_bars({"en": 2000, "de": 500, "<b>": 0}, "Languages", unit="Bytes")
    found = parse(page.to_html())
    assert [e.text for e in found.find("th")] == ["en", "de", "<b>"]
    assert [e.text for e in found.find("td", "number")] == ["2,000", "500", "0"]
    widths = [e.attributes["style"] for e in found.find("span")]
    assert widths == ["width:100.00%", "width:25.00%", "width:0.00%"]
    assert found.find("script") == []
    page.add_bars({}, "Nothing")
    assert parse(page.to_html()).unclosed == []


def test_a_searched_table_holds_all_its_rows_as_data(parse: Any) -> None:
    page = Page("A corpus")
    rows = [(HOSTILE, "\x00"), ("\udcff.txt", "</script>")]
    page.add_searched_table(["File", "Why"], rows, HOSTILE)
    found = parse(page.to_html())
    assert found.unclosed == []
    assert found.charts() == [[[HOSTILE, "\u2400"], ["\ufffd.txt", "</script>"]]]
    assert len(found.find("script")) == 2
    assert get_plotlyjs() not in page.to_html()


def test_hostile_text_stays_text(parse: Any) -> None:
    page = Page(HOSTILE, footer=HOSTILE)
    page.add_section(HOSTILE)
    page.add_heading(HOSTILE)
    page.add_text(HOSTILE)
    page.add_facts([(HOSTILE, HOSTILE)])
    page.add_table([HOSTILE], [[HOSTILE]], caption=HOSTILE)
    page.add_chart(stage_times_chart({HOSTILE: 1.0}), HOSTILE, note=HOSTILE)
    page.add_sample(HOSTILE, HOSTILE, label=HOSTILE)
    page.add_source(HOSTILE, HOSTILE)
    found = parse(page.to_html())
    assert found.unclosed == []
    assert found.find("img") == []
    assert len(found.find("script")) == 3  # the chart's data, plotly, and the page's own
    assert not [name for element in found.elements for name in element.attributes if name.startswith("on")]
    places = ["title", "h1", "h2", "p", "dt", "dd", "th", "td", "figcaption", "span", "code", "summary", "footer"]
    for tag in places:
        assert HOSTILE in [element.text for element in found.find(tag)], tag
    assert found.find("figure", "chart")[0].attributes["aria-label"] == HOSTILE
    (chart,) = found.charts()
    assert chart["data"][0]["y"] == [escaped_for_plotly(HOSTILE)]


def test_chart_data_cannot_end_its_script(parse: Any) -> None:
    page = Page("x")
    page.add_chart(Chart({"title": {"text": HOSTILE + "\u2028<!--<script>"}}), "x")
    text = page.to_html()
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert not set("<>&\u2028") & set(data[1])
    assert parse(text).charts()[0]["layout"]["title"]["text"] == HOSTILE + "\u2028<!--<script>"


def escaped_for_plotly(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_can_be_written_and_read_back(text: str) -> None:
    """Also lone surrogates and control characters, which a byte-level model writes while it is young."""
    from html.parser import HTMLParser

    found: list[str] = []
    parser = HTMLParser(convert_charrefs=True)
    parser.handle_data = found.append  # type: ignore[method-assign]
    parser.feed("<pre>" + escaped(text).encode("utf-8").decode("utf-8") + "</pre>")
    parser.close()
    shown = "".join(found)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        kept = before.isprintable() or before in "\t\n\r "
        assert after == before or not kept
        assert after in "\t\n\r" or ord(after) >= 0x20


def test_control_characters_become_pictures() -> None:
    assert escaped("\x00\x1b\x7f\x85\ud800") == "\u2400\u241b\u2421\ufffd\ufffd"


def test_rows_must_fit_the_header() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        Page("x").add_table(["one"], [[1, 2]])


def test_numbers_are_set_flush_right_also_when_written_as_text(parse: Any) -> None:
    page = Page("x")
    page.add_table(["a", "b", "c"], [["2.1123", True, "x1"], ["1,000", False, "2"], [None, None, None]])
    assert [element.text for element in parse(page.to_html()).find("th", "number")] == ["a"]


def test_written_file_is_the_document(full_page: Page, tmp_path: Path) -> None:
    full_page.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == full_page.to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    text = full_page.to_html()
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert 'name="viewport" content="width=device-width' in text
