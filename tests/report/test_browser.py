"""The page in a real browser: the charts are drawn, and nothing is asked of the network or refused by the policy."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sheepop.report import Drawing, Page, loss_chart, stage_times_chart
from sheepop.serve.drawing import drawing_script, drawing_style

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
]

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)"),
]


def test_charts_are_drawn(metrics: list[dict[str, Any]], tmp_path: Path, parse: Any) -> None:
    page = Page("A run <script>document.title = 'broken'</script>")
    page.add_chart(loss_chart(metrics), "Loss")
    page.add_chart(stage_times_chart({"Corpus & <b>": 3.0, "Training": 9.0}), "Time")
    page.add_sample("def ", "f(): pass</pre><img src=x onerror=\"document.title = 'broken'\">")
    page.write(tmp_path / "page.html")
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert "Content Security Policy" not in done.stderr
    assert "Uncaught" not in done.stderr
    dom = parse(done.stdout)
    assert len(dom.find("div", "js-plotly-plot")) == 2
    assert len(dom.find("svg", "main-svg")) >= 2
    assert len(dom.find("g", "scatterlayer")) >= 1
    assert [e.text for e in dom.find("text", "legendtext")] == ["Training", "Training, smoothed", "Held out"]
    assert [e.text for e in dom.find("text", "bartext")] == ["3.0 s", "9.0 s"]
    assert "Corpus & <b>" in [e.text for e in dom.find("text")]
    assert dom.find("title")[0].text == "A run <script>document.title = 'broken'</script>"


def test_wide_tables_scroll_and_show_it(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page = Page("A run")
    page.add_table([f"column {number}" for number in range(20)], [[f"value {number}" for number in range(20)]])
    page.write(tmp_path / "page.html")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 400, "height": 800})
        shown.goto(f"file://{tmp_path}/page.html")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 400, "the page itself does not"
        table = shown.locator(".scroll")
        assert table.evaluate("box => box.scrollWidth > box.clientWidth")
        assert "gradient" in table.evaluate("box => getComputedStyle(box).backgroundImage"), "a shadow at the cut edge"
        table.focus()
        shown.keyboard.press("ArrowRight")
        shown.wait_for_timeout(500)
        assert table.evaluate("box => box.scrollLeft") > 0, "keys scroll it, too"
        browser.close()


def test_a_table_is_searched_by_all_words(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page = Page("A corpus")
    rows = [(f"scans/{number}.png", "damaged" if number % 2 else "<b>empty</b>") for number in range(1200)]
    page.add_searched_table(["File", "Why"], rows, "Left out")
    page.write(tmp_path / "page.html")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shown = browser.new_page()
        shown.goto(f"file://{tmp_path}/page.html")
        assert shown.locator("tbody tr").count() == 500
        assert shown.locator("output").inner_text() == "1,200, the first 500 shown"
        shown.fill("input", "EMPTY 118")
        found = [line.split("\t") for line in shown.locator("tbody tr").all_inner_texts()]
        assert found == [
            [f"scans/{number}.png", "<b>empty</b>"] for number in (118, 1118, 1180, 1182, 1184, 1186, 1188)
        ]
        assert shown.locator("output").inner_text() == "7 of 1,200"
        browser.close()


def test_a_journey_is_drawn_from_the_file_alone(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    weights = [[1.0], [0.25, 0.75], [0.1, 0.2, 0.7]]
    data = {
        "start": 0, "position": 2, "length": 3, "channels": [4, 7], "width": 8, "heads": 2,
        "tokens": [{"text": text, "id": n, "position": n} for n, text in enumerate(("</script>", "\u05e9", "x" * 300))],
        "stream": [[[0.5, -0.5]] * 3] * 7, "scale": [[0.5] * 3] * 7, "giants": [], "weights": [weights, None, None],
        "mixed_by": ["attention", "mixer", "mixer"], "total": 2.0, "parts": [],
        "adds": {"embedding": 1.0, "attention.0": -2.0, "forward.0": math.nan, "attention.1": 4.0},
        "next": [{"id": 5, "text": "a", "probability": 0.75}, {"id": 6, "text": "b", "probability": math.inf}],
    }  # fmt: skip
    page = Page("A run")
    page.add_journey(data, Drawing(drawing_script(), drawing_style()), note="On its way.")
    page.write(tmp_path / "page.html")
    wrong: list[str] = []
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1000, "height": 800})
        shown.on("console", lambda message: wrong.append(message.text))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
        shown.goto(f"file://{tmp_path}/page.html")
        widths = {
            each.get_attribute("data-part"): float(each.get_attribute("data-width") or "nan")
            for each in shown.locator(".add").all()
        }
        expected = {"embedding": 4.0, "attention.0": 8.0, "forward.0": 0.0, "attention.1": 16.0}
        assert widths == {**expected, "forward.1": 0.0, "attention.2": 0.0, "forward.2": 0.0}
        arcs = "all => all.map((each) => [each.dataset.from, each.dataset.weight])"
        assert shown.locator(".arcs .looks").evaluate_all(arcs) == [["0", "0.1"], ["1", "0.2"], ["2", "0.7"]]
        assert shown.locator(".name text").last.text_content().strip("\u2068\u2069") == "x" * 12 + "\u2026"
        shown.locator("[data-key='token.1']").hover()
        assert shown.locator(".arcs .looks").evaluate_all(arcs) == [["0", "0.25"], ["1", "0.75"]]
        assert shown.locator(".arcs .found").evaluate_all(arcs) == [["1", "0.2"]]
        # A click unfolds another block, and a narrow window has a narrow picture.
        wide = "document.querySelector('.journey-picture').at.blocks.map((block) => block.width)"
        assert shown.evaluate(wide)[0] > shown.evaluate(wide)[1]
        shown.locator("[data-key='attention.1']").click(position={"x": 3, "y": 60})
        assert shown.evaluate(wide)[0] < shown.evaluate(wide)[1]
        shown.set_viewport_size({"width": 390, "height": 800})
        shown.wait_for_function("() => document.querySelector('.journey-picture').at.width < 390")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
    assert wrong == []
