"""The site of the documentation: built without a warning, complete in itself, with links that lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which has the site's scripts"),
]
# Attributes by which a page loads something, and by which it only leads there.
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "README")


class Page(HTMLParser):
    """The anchors of a page, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links = set[str](), list[tuple[bool, str]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        loads = [found[name] for of, name in LOADS if of == tag and name in found and found.get("rel") != "canonical"]
        self.links += [(True, link) for link in loads]
        self.links += [(False, found["href"])] if tag == "a" and "href" in found else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "docs" / "site" / "assets.py"], check=True, timeout=300)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr  # a warning is an error
    return place


@cache
def read(place: Path) -> Page:
    return Page(place.read_text(encoding="utf-8"))


def test_every_page_is_there(site: Path):
    assert {page.stem for page in site.glob("*.html")} == {*PAGES, "index", "404"}


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path):
    # The links of the page for missing pages begin at a server's root.
    pages = [place for place in site.rglob("*.html") if place.name != "404.html"]
    count = 0
    for place in pages:
        for loads, link in read(place).links:
            if re.match("(https?|mailto|data):", link):
                assert not loads or link.startswith("data:"), f"{place.name} loads {link}"
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (place.parent / path.partition("?")[0]).resolve() if path else place
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file() and target.is_relative_to(site), f"{place.name} links to {link}"
            assert not anchor or anchor in read(target).anchors, f"{place.name} links to {link}"
            count += 1
    assert count > 3000


def test_the_reference_has_what_the_package_gives(site: Path):
    import sheepop

    anchors = {anchor.rpartition(".")[2] for anchor in read(site / "api.html").anchors if anchor.startswith("sheepop.")}
    assert set(sheepop.__all__) - {"__version__", "register"} <= anchors
    assert {"generate", "activation", "ConfigError", "bits_per_byte"} <= anchors


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


def test_formulas_diagrams_and_the_search_work_from_the_disk(site: Path, browser):
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
    for name in ("model", "evaluation", "gguf", "training"):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector(".katex")
        assert page.locator(".katex-error").count() == 0
        assert page.evaluate("[...document.querySelectorAll('.arithmatex')].every(e => e.querySelector('.katex'))")
        # A diagram is drawn in a shadow root, which takes the place of its source.
        page.wait_for_function("[...document.querySelectorAll('.mermaid')].every(e => e.tagName == 'DIV')")
        assert page.locator("div.mermaid").count() == 1
    page.keyboard.press("/")
    page.keyboard.type("learning rate")
    page.wait_for_selector(".md-search-result__item")
    assert wrong == []
