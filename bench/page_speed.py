"""The page in a browser: seconds until its picture is drawn, and how smooth the picture's motion is.

A network of GPT-2's shape with 124M weights is served and looked at with Chromium, each time in a fresh page of 1,280
pixels without a GPU. The page opens with the picture of 20 tokens; the time is from the request of the page to the
first frame behind the picture. The motion is one pass of four seconds, by the frames that are drawn according to
Chromium's own trace. The attention of 512 tokens is the map of one head, beside small ones of all twelve. A model given
with ``--model`` is looked at, too: how long after the answer to the request for its trace the picture is drawn.

python bench/page_speed.py --json bench/results/page.json --model gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from record import add_json_option, write_record
from sheepop.checkpoint import save_model
from sheepop.core.config import validate
from sheepop.jobs.serve import WatchedRuns
from sheepop.model import ModelConfig, build_model
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.server import Server
from sheepop.serve.stock import Stock
from sheepop.tokenizer import CharTokenizer

ROUNDS = 3
TRACED = ["devtools.timeline", "devtools.timeline.frame", "disabled-by-default-devtools.timeline.frame"]
LONG_FRAME = 1.5 / 60
PASS = 4  # seconds
PICTURE = "#prompt=Sheep+jump+over+dogs"
# Notes when the picture is drawn: at the frame after its last part is there.
WATCH = """new MutationObserver(() => {
  if (window.drawn === undefined && document.querySelector('.journey-picture .odd')) {
    window.drawn = null;
    requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = performance.now(); }));
  }
}).observe(document, { childList: true, subtree: true })"""
ANSWERED = "performance.getEntriesByType('resource').find((each) => each.name.endsWith('/traces')).responseEnd"


@contextmanager
def served(place: Path) -> Iterator[str]:
    """The address of a page with the model at `place`."""
    config = ServerConfig(ui=True)
    registry = Registry(Stock({"model": place}, {}, config, "cpu"))
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(registry, config, runs=WatchedRuns({})), registry, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/ui"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """A fresh page, once its picture is drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(address)
    page.wait_for_function("() => window.drawn > 0")
    yield page
    context.close()


def processor_seconds() -> float:
    """The processor time of the server, which is this process, and of the browser."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def first_screens(browser: Browser, address: str) -> dict[str, float]:
    """Medians of seconds until the picture is drawn: since the request of the page, and since its trace came.

    The processor time of both server and browser tells how far a busy machine has delayed them.
    """
    rows = []
    for _ in range(ROUNDS + 1):
        before = processor_seconds()
        with opened(browser, address + PICTURE) as page:
            drawn, answered = page.evaluate(f"[window.drawn, {ANSWERED}]")
            rows.append((drawn / 1000, (drawn - answered) / 1000, processor_seconds() - before))
    names = ("first_screen_seconds", "after_trace_seconds", "first_screen_processor_seconds")
    # The first round also loads the model.
    return {name: statistics.median(values) for name, values in zip(names, zip(*rows[1:], strict=True), strict=True)}


def frames(browser: Browser, address: str) -> dict[str, float]:
    """Frames a second while a pass is played, and the share of intervals between frames that are long."""
    with opened(browser, address + PICTURE) as page:
        page.wait_for_timeout(500)
        browser.start_tracing(page=page, categories=TRACED)
        page.get_by_role("button", name="Play").click()
        page.wait_for_timeout(PASS * 1000)
        events = json.loads(browser.stop_tracing())["traceEvents"]
    times = sorted(event["ts"] / 1e6 for event in events if event["name"] == "DrawFrame")
    begin, end = times[0] + 0.1, times[0] + PASS - 0.1  # the pass alone
    inside = [at for at in times if begin <= at <= end]
    gaps = [b - a for a, b in itertools.pairwise(inside)]
    long = sum(gap > LONG_FRAME for gap in gaps) / len(gaps)
    return {"frames_per_second": len(gaps) / sum(gaps), "long_frames": long, "longest_seconds": max(gaps)}


def map_of_attention(browser: Browser, address: str) -> float:
    """Seconds from a click on the tab until the attention over 512 tokens is drawn."""
    page = browser.new_page()
    page.goto(f"{address}#view=text&prompt={'ab' * 256}")
    page.wait_for_selector("body[data-ready]")
    started = time.perf_counter()
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_selector("#view .map canvas[width='512']")
    found = time.perf_counter() - started
    page.close()
    return found


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a further model to look at")
    add_json_option(parser)
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    model = build_model(validate(ModelConfig, {"preset": "gpt2", "dropout": 0.0}), 0).eval().requires_grad_(False)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tools:
        save_model(Path(folder, "gpt2"), model, CharTokenizer(), {})
        del model
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with served(Path(folder, "gpt2")) as address:
            results["gpt2"] = first_screens(browser, address)
            maps = [map_of_attention(browser, address) for _ in range(ROUNDS + 1)][1:]
            results["gpt2"]["attention_of_512_tokens_seconds"] = statistics.median(maps)
            results["gpt2"]["motion"] = frames(browser, address)
        if given.model is not None:
            with served(given.model) as address:
                results[given.model.stem] = first_screens(browser, address)
        browser.close()
    print(json.dumps(results, indent=2))
    write_record(given.json, results)


if __name__ == "__main__":
    main()
