"""The page in a browser: seconds until it can be used, and until the attention of all heads over 512 tokens is drawn.

A network of GPT-2's shape with 124M weights is served and looked at with Chromium, each time in a fresh page. The page
opens with the picture of 20 tokens. The map is that of one head, beside small ones of all twelve.

python bench/page_speed.py --json bench/results/page.json
"""

from __future__ import annotations

import argparse
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

from playwright.sync_api import Browser, sync_playwright

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

ROUNDS = 5


@contextmanager
def served() -> Iterator[str]:
    """The address of the page."""
    config = ServerConfig(ui=True)
    model = build_model(validate(ModelConfig, {"preset": "gpt2", "dropout": 0.0}), 0).eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "gpt2")
        save_model(place, model, CharTokenizer(), {})
        yield from _serve(Registry(Stock({"gpt2": place}, {}, config, "cpu")), config)


def _serve(registry: Registry, config: ServerConfig) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(registry, config, runs=WatchedRuns({})), registry, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/ui"
    server.should_exit = True
    thread.join()


def seconds_until(browser: Browser, address: str, ready: str, click: str | None = None) -> float:
    """From the request of the page, or the click on a tab of it, until an element is there."""
    page = browser.new_page()
    started = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    if click is not None:
        started = time.perf_counter()
        page.get_by_role("tab", name=click).click()
    page.wait_for_selector(ready)
    found = time.perf_counter() - started
    page.close()
    return found


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    cases: dict[str, tuple[str, str, str | None]] = {
        "open the page with 20 tokens": ("#prompt=Sheep+jump+over+dogs", ".journey-picture .odd", None),
        "attention over 512 tokens": (f"#view=text&prompt={'ab' * 256}", "#view .map canvas[width='512']", "Attention"),
    }
    results: dict[str, Any] = {}
    with served() as address, sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (place, ready, click) in cases.items():
            times = [seconds_until(browser, address + place, ready, click) for _ in range(ROUNDS + 1)][1:]
            results[name] = statistics.median(times)
            print(f"{name:<34} {results[name]:6.2f} s")
        browser.close()
    write_record(given.json, {"seconds": results})


if __name__ == "__main__":
    main()
