"""Takes pictures of every state of the page, in three widths, light and dark, with Chromium.

Each state becomes one sheet in docs/images, and the motion of a token one sheet of frames. The page is that of a
running server, whose first model is shown. For all states it needs two models and a run with analyses.

For "reasoning" the server's template must mark reasoning: its models then write after a pattern, so any model will do.

Example:  sheepop ui runs/quickstart runs/tuned
          python docs/site/screens.py http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

TARGET = Path(__file__).parents[1] / "images"
SIZES = ((1440, 900), (1024, 768), (390, 844))
HEIGHT, GAP, PAPER = 560, 12, (214, 208, 196)
FRAMES, EVERY = 6, 650  # of the motion, and milliseconds between them
SETTLED = 800  # milliseconds
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THOUGHT = """I cannot know the weather, but a tool can.</think>One moment, I look it up.
<tool_call>
{"name": "weather", "arguments": {"city": "Cork"}}
</tool_call>"""


def _ask(page: Page, words: str = "Write one sentence about a sheep.") -> None:
    page.locator("#say").fill(words)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").wait_for(timeout=60_000)


def _think(page: Page) -> None:
    """Lets the model think and call a tool."""
    more = {"guided_regex": re.escape(THOUGHT)}
    ask = "**/v1/chat/completions"
    page.route(ask, lambda route: route.continue_(post_data={**route.request.post_data_json, **more}))
    _ask(page, "Will it rain in Cork?")
    page.locator(".answer summary").first.click()


def _duel(page: Page) -> None:
    page.locator("#say").fill("def read_lines(path):")
    page.keyboard.press("Control+Enter")
    page.locator(".choices button").nth(3).wait_for(timeout=60_000)


def _nothing(page: Page) -> None:
    """Shows a state as its address opens it."""


# The views of a trace that have nothing to open.
_TRACE = ("text", "embedding", "projections", "forward", "stream", "lens", "growth", "space", "checks")
# Name: the address behind `#`, and what is done there.
STATES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "journey": ("room=trace", _nothing),
    "station": ("room=trace&open=attention.0", _nothing),
    "tour": ("room=trace&tour=3", _nothing),
    "attention": ("room=trace&view=attention", _nothing),
    "next": ("room=trace&view=next", _nothing),
    "chat": ("room=chat&sure=yes", _ask),
    "reasoning": (urlencode({"room": "chat", "max_tokens": 200, "tools": json.dumps([TOOL])}), _think),
    "arena": ("room=arena", _duel),
    "gains": ("room=analysis&view=gains", _nothing),
    "influence": ("room=analysis&view=influence", _nothing),
    "loop": ("room=analysis&view=loop", _nothing),
    "stability": ("room=analysis&view=training", _nothing),
    "training": ("room=training", _nothing),
    "data": ("room=data", _nothing),
    **{view: (f"room=trace&view={view}", _nothing) for view in _TRACE},
    **{view: (f"room=analysis&view={view}", _nothing) for view in ("decode", "blocks", "compare")},
}


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the address of a server with --ui")
    parser.add_argument("--states", nargs="+", choices=(*STATES, "motion"), default=[*STATES, "motion"])
    parser.add_argument("--output", type=Path, default=TARGET)
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in given.states:
            found = _motion(browser, given.server) if name == "motion" else _state(browser, given.server, *STATES[name])
            place = given.output / f"page-{name}.webp"
            _sheet(list(found), 3).save(place, quality=72, method=6)
        browser.close()


def _state(browser: Browser, server: str, address: str, act: Callable[[Page], None]) -> Iterator[Image.Image]:
    for scheme in ("light", "dark"):
        for width, height in SIZES:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # type: ignore[arg-type]
                reduced_motion="reduce",
            )
            _open(page, server, address)
            act(page)
            yield Image.open(io.BytesIO(page.screenshot()))
            page.close()


def _motion(browser: Browser, server: str) -> Iterator[Image.Image]:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    _open(page, server, "room=trace")
    page.get_by_role("button", name="Play").click()
    for _ in range(FRAMES):
        yield Image.open(io.BytesIO(page.screenshot()))
        page.wait_for_timeout(EVERY)
    page.close()


def _open(page: Page, server: str, address: str) -> None:
    page.goto(f"{server}/ui#{address}")
    page.locator("#rooms a").first.wait_for()
    page.wait_for_load_state("networkidle", timeout=120_000)
    page.wait_for_timeout(SETTLED)
    while "…" in (page.locator("#status").text_content() or ""):  # the page's policy forbids a condition as text
        page.wait_for_timeout(SETTLED)


def _sheet(pictures: list[Image.Image], columns: int) -> Image.Image:
    """All pictures on one sheet, equally high, in rows."""
    scaled = [each.convert("RGB").resize((each.width * HEIGHT // each.height, HEIGHT)) for each in pictures]
    rows = [scaled[start : start + columns] for start in range(0, len(scaled), columns)]
    width = max(sum(each.width + GAP for each in row) for row in rows) + GAP
    sheet = Image.new("RGB", (width, len(rows) * (HEIGHT + GAP) + GAP), PAPER)
    for number, row in enumerate(rows):
        x = GAP
        for each in row:
            sheet.paste(each, (x, GAP + number * (HEIGHT + GAP)))
            x += each.width + GAP
    return sheet


if __name__ == "__main__":
    main()
