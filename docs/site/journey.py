"""Draws the picture that docs/hello-world.md opens with, of a text on its way through a model, with Chromium.

Example:  python docs/site/journey.py runs/quickstart --prompt "Hello World"
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import sheepop
from sheepop.interpret.journey import journey_of
from sheepop.report import Drawing, Page
from sheepop.serve.drawing import drawing_script, drawing_style

TARGET = Path(__file__).parents[1] / "images" / "hello-journey.png"
WIDTH = 1000


def main() -> None:
    """Draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a run, checkpoint or model directory")
    parser.add_argument("--prompt", default="Hello World")
    given = parser.parse_args()
    trace = sheepop.load(given.model, device="cpu", dtype="float32").trace(given.prompt)
    page = Page("Journey")
    page.add_journey(journey_of(trace, -1).to_dict(trace), Drawing(drawing_script(), drawing_style()))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as tools:
        page.write(Path(place, "page.html"))
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shown = browser.new_page(
            viewport={"width": WIDTH, "height": 800}, device_scale_factor=1.5, color_scheme="light"
        )
        shown.goto(f"file://{place}/page.html")
        shown.locator(".journey-picture .odd").first.wait_for()
        shown.locator(".journey").screenshot(path=TARGET)
        browser.close()


if __name__ == "__main__":
    main()
