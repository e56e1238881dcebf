"""The page that looks inside: its slices are those of the trace, and other sites cannot get them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sheepop import serve
from sheepop.checkpoint import load_model, save_model
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.interpret.lens import logit_lens
from sheepop.interpret.parts import direct_attribution, norm_statistics
from sheepop.interpret.trace import Trace
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer import CharTokenizer

from .conftest import KINDS, Live, Shelf, model_of, tiny_network

httpx = pytest.importorskip("httpx")
PROMPT = "</script>A\x1b[0m\nB"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


AXE = Path(os.environ.get("SHEEPOP_AXE", ""))
needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason="needs SHEEPOP_AXE, the path of axe.min.js of the npm package axe-core"
)


def violations(page: Any) -> list[tuple[str, str]]:
    """The rules of accessibility that a page breaks, each with an example."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return [(each["id"], each["nodes"][0]["html"][:120]) for each in page.evaluate("axe.run()")["violations"]]


# What can be operated, is seen, and never had the focus. A token of the picture is chosen by arrow keys.
LEFT = """() => [...document.querySelectorAll(
    'a[href], button, input, select, textarea, summary, canvas[tabindex], [role=button]')]
  .filter((each) => !each.disabled && !each.hasAttribute('data-reached') && !each.matches('.name, [role=tab]')
    && each.checkVisibility()).map((each) => each.outerHTML.slice(0, 90))"""
# How many elements the group of the focused element has, in which arrow keys move.
GROUP = """() => document.activeElement.closest('.journey-picture, .grid, .heads, .chips, table')
  ?.querySelectorAll('button, .station, .odd').length ?? 0"""


def left_by_keys(page: Any) -> list[str]:
    """What can be operated on a page and is not reached by Tab and, within groups, by the arrow keys."""
    page.evaluate("addEventListener('focusin', ({ target }) => target.setAttribute('data-reached', ''))")
    for _ in range(100):
        page.keyboard.press("Tab")
        count = page.evaluate(GROUP)
        for key in ("ArrowLeft", "ArrowRight"):
            for _ in range(count):
                page.keyboard.press(key)
        if page.evaluate("document.activeElement === document.body"):
            break
    found: list[str] = page.evaluate(LEFT)
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("needs Chromium (chromium, chromium-browser or google-chrome)")
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def inside() -> Iterator[Live]:
    server = Live(ServerConfig(ui=True))
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(inside: Live) -> Iterator[Any]:
    with httpx.Client(base_url=f"{inside.url}/ui", timeout=30) as found:
        yield found


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.of(tiny_network(), CharTokenizer(), PROMPT)


@pytest.fixture(scope="module")
def begun(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.post("/traces", json={"prompt": PROMPT, "model": "plain"}).json()
    return found


def floats(response: Any) -> np.ndarray:
    shape = [int(size) for size in response.headers["x-shape"].split(",")]
    return np.frombuffer(response.content, "<f4").reshape(shape)


def test_a_trace_is_the_models_own(client: Any, begun: dict[str, Any], trace: Trace) -> None:
    assert client.get("/models").json() == [
        {"name": "chat", "chats": True, "encodes": False, "recorded": False},
        {"name": "plain", "chats": False, "encodes": False, "recorded": False},
    ]
    assert [token["id"] for token in begun["tokens"]] == trace.token_ids
    assert "".join(token["text"] for token in begun["tokens"]) == "</script>A\\x1b[0m\nB"
    assert client.get(f"/traces/{begun['number']}/lens").json()["ids"] == logit_lens(trace).ids.tolist()
    checks = client.get(f"/traces/{begun['number']}/checks").json()
    assert begun["tensors"] == trace.names and len(checks) == 8 and all(check["holds"] for check in checks)
    for name in ("blocks.1.attention.weights", "blocks.0.feed_forward.hidden", "logits", "residuals"):
        expected = trace.residuals if name == "residuals" else trace[name]
        found = floats(client.get(f"/traces/{begun['number']}/tensor", params={"name": name}))
        np.testing.assert_array_equal(found, expected.numpy())
    column = client.get(f"/traces/{begun['number']}/tensor", params={"name": "residuals", "column": 3})
    np.testing.assert_array_equal(floats(column), trace.residuals[..., 3].numpy())
    head = client.get(f"/traces/{begun['number']}/tensor", params={"name": "blocks.1.attention.unmasked", "head": 2})
    np.testing.assert_array_equal(floats(head), trace.unmasked_scores("blocks.1.attention")[2].numpy())


def test_what_is_read_off_is_what_the_functions_say(client: Any, begun: dict[str, Any], trace: Trace) -> None:
    place = f"/traces/{begun['number']}"
    logits = floats(client.get(f"{place}/logits", params={"position": 3}))
    np.testing.assert_array_equal(logits, trace.logits_behind(3).numpy())
    behind = client.get(f"{place}/next", params={"position": 3, "count": 4}).json()
    assert [token["id"] for token in behind["tokens"]] == np.argsort(-logits)[:4].tolist()
    assert behind["logsumexp"] == pytest.approx(float(np.log(np.exp(logits.astype(float)).sum())))
    parts = client.get(f"{place}/attribution", params={"position": 3, "token": 65, "against": 66}).json()
    found = direct_attribution(trace, 3, 65, 66)
    assert {part["name"]: part["nats"] for part in parts["parts"]} == pytest.approx(
        dict(zip(found.names, found.values, strict=True))
    )
    assert client.get(f"{place}/map").json()["points"][0]["text"] == "<"
    assert len(client.get(f"{place}/neighbours", params={"token": 65}).json()) == 8


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("/traces/{0}/tensor?name=nothing", 404, "no tensor 'nothing'"),
        ("/traces/{0}/tensor?name=blocks.7.attention.unmasked", 404, "no tensor"),
        ("/traces/{0}/tensor?name=blocks.0.attention.weights&head=9", 404, "no head 9"),
        ("/traces/{0}/tensor?name=final&head=0", 404, "no head 0"),
        ("/traces/{0}/tensor?name=final&column=32", 404, "no column 32"),
        ("/traces/{0}/tensor?name=source_residuals", 404, "no tensor"),
        ("/traces/{0}/tensor?name=blocks.9.attention_norm", 404, "no tensor"),
        ("/traces/{0}/tensor?name=blocks.0.feed_forward.angles", 404, "no tensor"),
        ("/traces/{0}/tensor", 400, "name"),
        ("/traces/{0}/logits?position=99", 400, "no position 99; the prompt has"),
        ("/traces/{0}/next?position=x", 400, "position"),
        ("/traces/{0}/attribution?position=0&token=999", 400, "no such token"),
        ("/traces/{0}/neighbours?token=-1", 400, "no token -1"),
        ("/traces/99999/map", 404, "no longer exists"),
        ("/app.py", 404, "no file 'app.py'"),
        ("/..%2finside.py", 404, ""),
        ("/%2e%2e/inside.py", 404, ""),
        ("/vendor/../../inside.py", 404, ""),
        ("/vendor/packages.json", 404, "no file 'vendor/packages.json'"),
        ("/vendor/..%2f..%2finside.py", 404, ""),
    ],
)
def test_what_is_not_there_is_refused(client: Any, begun: dict[str, Any], path: str, status: int, problem: str) -> None:
    response = client.get(path.format(begun["number"]))
    assert response.status_code == status and problem in response.json()["error"]["message"]


def test_prompts_that_cannot_be_traced_are_refused(client: Any) -> None:
    for asked, status, problem in (
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": "x" * 300}, 400, "300 tokens, but the model reads 256"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": "a", "path": "/etc"}, 400, "path"),
        ({"prompt": "a", "model": "none"}, 404, "no model 'none'"),
    ):
        response = client.post("/traces", json=asked)
        assert response.status_code == status and problem in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_other_sites_get_nothing(client: Any, begun: dict[str, Any], headers: dict[str, str]) -> None:
    for method, path in (
        ("GET", ""),
        ("GET", "/models"),
        ("POST", "/traces"),
        ("GET", f"/traces/{begun['number']}/map"),
    ):
        response = client.request(method, path, headers=headers, json={"prompt": "a"} if method == "POST" else None)
        assert response.status_code == 403 and "points" not in response.json()


def test_other_machines_get_nothing(inside: Live) -> None:
    async def ask(address: str) -> int:
        transport = httpx.ASGITransport(inside.server.config.app, client=(address, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return int((await client.get("/ui/models")).status_code)

    assert asyncio.run(ask("127.0.0.1")) == 200
    assert asyncio.run(ask("10.0.0.5")) == 403


def test_the_page_loads_nothing_from_elsewhere(client: Any) -> None:
    folder = Path(serve.__file__).parent / "page"
    for path in ("", *(path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix != ".json")):
        response = client.get(f"/{path}")
        assert response.status_code == 200, path
        assert "default-src 'none'" in response.headers["content-security-policy"]
        # The policy forbids it to other projects' scripts too, but they have the code and links to their authors.
        if str(path).endswith((".js", ".css", ".html", "/")) and "vendor" not in str(path):
            assert "innerHTML" not in response.text and "https://" not in response.text


def test_tokens_are_traced_as_they_are(client: Any, trace: Trace) -> None:
    """Generated token ids may differ from those that the tokenizer makes of their text."""
    found = client.post("/traces", json={"prompt": [65, 0, 66], "model": "plain"}).json()
    assert [token["id"] for token in found["tokens"]] == [65, 0, 66]
    for ids, problem in (([65, 128], "128"), ([], "empty"), ([65.5], "prompt")):
        response = client.post("/traces", json={"prompt": ids, "model": "plain"})
        assert response.status_code == 400 and problem in response.json()["error"]["message"]


def test_two_viewers_see_their_own(client: Any) -> None:
    """Two viewers take turns, so that each trace is dropped and computed again."""
    begun = [client.post("/traces", json={"prompt": text, "model": "plain"}).json() for text in ("first", "the other")]
    expected = [Trace.of(tiny_network(), CharTokenizer(), found["prompt"]) for found in begun]

    def look(turn: int) -> np.ndarray:
        number, name = begun[turn % 2]["number"], f"blocks.{turn // 2 % 2}.attention.weights"
        return floats(client.get(f"/traces/{number}/tensor", params={"name": name}))

    with ThreadPoolExecutor(8) as pool:
        for turn, found in enumerate(pool.map(look, range(24))):
            np.testing.assert_array_equal(
                found, expected[turn % 2][f"blocks.{turn // 2 % 2}.attention.weights"].numpy()
            )


def test_a_browser_that_leaves_disturbs_nobody(inside: Live, client: Any) -> None:
    place, body = httpx.URL(inside.url), json.dumps({"prompt": "x" * 250, "model": "plain"})
    head = f"POST /ui/traces HTTP/1.1\r\nHost: {place.host}\r\nContent-Type: application/json"
    for stays in (False, False, False, False, True):
        with socket.create_connection((place.host, place.port)) as browser:
            browser.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            assert not stays or browser.recv(100).startswith(b"HTTP/1.1 200")
    assert client.post("/traces", json={"prompt": "still here", "model": "plain"}).status_code == 200


def test_models_are_read_anew(inside: Live, client: Any) -> None:
    """A trace of the old model stays available after a reload."""
    number = client.post("/traces", json={"prompt": "a", "model": "plain"}).json()["number"]
    before = model_of(inside.registry, "plain")
    assert [model["name"] for model in client.post("/reload").json()] == ["chat", "plain"]
    assert model_of(inside.registry, "plain") is not before
    assert client.get(f"/traces/{number}/map").status_code == 200


def test_a_model_that_is_written_while_it_is_read_is_one_or_the_other(tmp_path: Path) -> None:
    """A model that is being written is never read in part: the reload reports it and keeps the old model."""
    place, config = tmp_path / "m", ServerConfig(ui=True)
    networks = [tiny_network(seed) for seed in (4, 9)]
    save_model(place, networks[0], CharTokenizer(), {})
    registry = Registry(Shelf(lambda name: ServedModel(name, load_model(place), config), ["m"], config))
    expected = [Trace.of(network, CharTokenizer(), "Hello")["logits"] for network in networks]
    over = threading.Event()

    def write() -> None:
        for turn in itertools.count(1):
            save_model(place, networks[turn % 2], CharTokenizer(), {}, replace=True)
            if over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    seen = set[int]()
    try:
        for turn in range(600):  # a busy machine may need more turns to find the other model whole
            if turn >= 60 and len(seen) == 2:
                break
            with contextlib.suppress(CheckpointError):
                registry.reload()
            model = model_of(registry, "m")
            found = Trace.of(model.generator.model, model.tokenizer, "Hello")["logits"]
            (which,) = [number for number, logits in enumerate(expected) if torch.equal(found, logits)]
            seen.add(which)
    finally:
        over.set()
        writer.join()
        registry.close()
    assert seen == {0, 1}


def test_old_traces_go_when_there_are_many(inside: Live) -> None:
    with httpx.Client(base_url=f"{inside.url}/ui", timeout=60) as client:
        first = client.post("/traces", json={"prompt": "a"}).json()["number"]
        for _ in range(16):
            last = client.post("/traces", json={"prompt": "b"}).json()["number"]
        assert client.get(f"/traces/{first}/map").status_code == 404
        assert client.get(f"/traces/{last}/map").status_code == 200


def test_the_page_is_there_only_when_asked_for(live: Live) -> None:
    assert httpx.get(f"{live.url}/ui").status_code == 404
    with pytest.raises(ConfigError, match="ui works without keys"):
        ServerConfig(ui=True, api_keys="keys.json")
    with pytest.raises(ConfigError, match="ui looks into models of this process"):
        ServerConfig(ui=True, engine="ray")


@pytest.fixture(scope="module")
def others() -> Iterator[Live]:
    server = Live(ServerConfig(ui=True), models=list(KINDS))
    yield server
    server.close()


def test_an_encoder_decoder_is_traced_with_its_target(others: Live) -> None:
    trace = Trace.of(tiny_network(**KINDS["pairs"]), CharTokenizer(), "a sheep", "ram")
    with httpx.Client(base_url=f"{others.url}/ui", timeout=30) as client:
        assert client.get("/models").json()[0] == {
            "name": "pairs",
            "chats": False,
            "encodes": True,
            "recorded": False,
        }
        begun = client.post("/traces", json={"prompt": "a sheep", "target": "ram", "model": "pairs"}).json()
        assert (begun["prompt"], begun["target"], begun["tensors"]) == ("a sheep", "ram", trace.names)
        assert [token["text"] for token in begun["source_tokens"]] == [*"a sheep", "<eos>"]
        assert (begun["sizes"]["layers"], begun["sizes"]["encoder_layers"]) == (2, 1)
        for name in ("encoder_blocks.0.attention.weights", "blocks.1.cross_attention.weights", "memory", "logits"):
            found = floats(client.get(f"/traces/{begun['number']}/tensor", params={"name": name}))
            np.testing.assert_array_equal(found, trace[name].numpy())
        assert {point["text"] for point in client.get(f"/traces/{begun['number']}/map").json()["points"]} >= {*"sheram"}
        refused = client.post("/traces", json={"prompt": "a", "target": "b", "model": "experts"})
        assert refused.status_code == 400 and "reads one text" in refused.json()["error"]["message"]


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
def test_every_view_shows_the_numbers_of_the_trace(inside: Live, trace: Trace) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(accept_downloads=True)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(inside.url) else wrong.append(asked.url))
        page.goto(f"{inside.url}/ui#view=text&numbers=true")
        page.select_option("#model", "plain")
        page.fill("#prompt", "Hello")
        page.click("#ask button")
        short = Trace.of(tiny_network(), CharTokenizer(), "Hello")
        page.wait_for_selector(".token:nth-child(5)")
        shown = lambda selector: page.locator(selector).all_inner_texts()  # noqa: E731

        def view(name: str, heading: str) -> None:
            page.get_by_role("tab", name=name, exact=True).click()
            page.locator("#view h2", has_text=heading).first.wait_for()

        view("Text", "Text and tokens")
        assert shown("#view tbody td:nth-child(4)") == [str(each) for each in short.token_ids]
        view("Vectors", "Tokens become vectors")
        assert shown("#view tbody tr:first-child td")[1:] == [f"{x:.4f}" for x in short.embedded[0, :12].tolist()]
        view("Queries", "Queries, keys and values of attention of block 0")
        page.locator("#view .knobs").last.get_by_label("looks at").select_option(index=2)
        q, k = (short[f"blocks.0.attention.rotated_{each}"][0] for each in "qk")
        products = [
            [f"{a:.4f}", f"{b:.4f}", f"{a * b:.4f}"] for a, b in zip(q[-1].tolist(), k[2].tolist(), strict=True)
        ]
        rows = page.locator("#view tbody").last.locator("tr")
        assert [rows.nth(row).locator("td").all_inner_texts()[1:] for row in range(len(products))] == products
        score = float(short.unmasked_scores("blocks.0.attention")[0, -1, 2])
        assert rows.last.locator("td").all_inner_texts()[-1] == f"{score:.4f}"
        turned = page.locator("#view table").nth(3).locator("tbody tr").nth(1).locator("td").all_inner_texts()
        assert turned[1:] == [f"{x:.4f}" for x in short.angles("blocks.0.attention")[1].tolist()]
        view("Residual", "The residual stream")
        shown_norm = page.locator("#view tbody tr", has_text="feed-forward").last.locator("td").all_inner_texts()
        assert shown_norm[1:] == [f"{x:.4f}" for x in norm_statistics(short, "blocks.0.feed_forward_norm")[-1].tolist()]
        page.get_by_label("Dimension, 0 to 31").fill("7")
        page.locator("#view svg[aria-label^='Dimension 7 of the residual stream']").wait_for()
        view("Attention", "Attention of block 0")
        weights, values = short["blocks.0.attention.weights"][0, -1], short["blocks.0.attention.v"][0, :, 0]
        expected = [
            [f"{w:.4f}", f"{v:.4f}", f"{w * v:.4f}"] for w, v in zip(weights.tolist(), values.tolist(), strict=True)
        ]
        written, terms = page.locator("#view tbody").first, page.locator("#view tbody").last
        rows = terms.locator("tr")
        assert [rows.nth(row).locator("td").all_inner_texts()[1:] for row in range(5)] == expected
        outputs = short["blocks.0.attention.head_outputs"][0]
        assert terms.locator("tr:last-child td").all_inner_texts()[-1] == f"{float(outputs[-1, 0]):.4f}"
        written.locator("tr").nth(1).get_by_role("button").nth(3).click()
        page.wait_for_selector(".token:nth-child(2)[aria-pressed=true]")
        page.locator("#view tbody").last.locator("tr").nth(2).filter(has_text="sum").wait_for()
        page.locator("#view tbody").first.locator("tr").nth(1).get_by_role("button").nth(3).click()
        total = float(outputs[1, 3])
        assert page.locator("#view tbody").last.locator("tr:last-child td").all_inner_texts()[-1] == f"{total:.4f}"
        with page.expect_download() as download:
            page.click("#save")
        kept = download.value.path().read_text(encoding="utf-8")
        assert download.value.suggested_filename == "attention.html" and f"{total:.4f}" in kept
        assert kept.count("data:image/png;base64,") == 5 and "<script" not in kept and inside.url not in kept
        view("Lens", "What each layer would say")
        lens = logit_lens(short)
        best = [short.text_of(int(each)) for each in lens.ids[-1, :, 0]]
        assert [
            text.replace("␣", " ").replace("⏎", "\n") for text in shown("#view tbody tr:first-child button")
        ] == best
        page.click(".token:nth-child(5)")
        view("Next token", "The next token")
        top = short.predictions[-1].top[0][1]
        assert shown("#view .bars > span")[0].startswith(f"{100 * top:.1f} %")
        others = {"Feed-forward": "Feed-forward network", "Residual": "The residual stream", "Map": "The space"}
        for name, heading in {**others, "Checks": "Self-checks"}.items():
            view(name, heading)
        assert page.locator("#view .bad").count() == 0
        page.fill("#prompt", PROMPT)
        page.click("#ask button")
        page.wait_for_selector(f".token:nth-child({trace.num_tokens})")
        assert page.title() == "SheepOp: look inside" and page.locator("#tokens script").count() == 0
        browser.close()
    assert wrong == []


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
def test_sources_and_experts_are_shown_too(others: Live) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    pairs = Trace.of(tiny_network(**KINDS["pairs"]), CharTokenizer(), "a sheep", "ram")
    mixture = Trace.of(tiny_network(**KINDS["experts"]), CharTokenizer(), "a sheep")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def view(name: str, heading: str) -> None:
            page.get_by_role("tab", name=name, exact=True).click()
            page.locator("#view h2", has_text=heading).first.wait_for()

        page.goto(f"{others.url}/ui#prompt=a+sheep&target=ram&model=pairs&view=text&numbers=true")
        page.wait_for_selector(".token.source:nth-child(8)")
        assert page.locator(".token:not(.source)").count() == 4
        view("Attention", "Attention of encoder block 0")
        page.get_by_label("Block").select_option(label="Decoder block 1")
        page.locator("#view .knobs").get_by_label("Look at").select_option(label="The source")
        page.locator("#view h2", has_text="Cross-attention of decoder block 1").wait_for()
        rows = page.locator("#view tbody").last.locator("tr")
        weights = pairs["blocks.1.cross_attention.weights"][0, -1].tolist()
        values = pairs["blocks.1.cross_attention.v"][0, :, 0].tolist()
        assert [rows.nth(row).locator("td").all_inner_texts()[1:] for row in range(8)] == [
            [f"{w:.4f}", f"{v:.4f}", f"{w * v:.4f}"] for w, v in zip(weights, values, strict=True)
        ]
        total = float(pairs["blocks.1.cross_attention.head_outputs"][0, -1, 0])
        assert rows.last.locator("td").all_inner_texts()[-1] == f"{total:.4f}"
        view("Queries", "Queries, keys and values of cross-attention of decoder block 1")
        product = page.locator("#view tbody").last.locator("tr").last.locator("td").all_inner_texts()[-1]
        assert product == f"{float(pairs.unmasked_scores('blocks.1.cross_attention')[0, -1, 0]):.4f}"
        view("Residual", "The residual stream")
        added = page.locator("#view tbody tr", has_text="cross-attention adds").locator("td").all_inner_texts()[1:]
        assert added == [f"{x:.4f}" for x in pairs["blocks.1.cross_attention_output"][-1, :12].tolist()]
        view("Text", "The target")
        view("Vectors", "The source")
        first = page.locator("#view tbody").first.locator("tr").first.locator("td").all_inner_texts()[1:]
        assert first == [f"{x:.4f}" for x in pairs["source_embedded"][0, :12].tolist()]
        for name, heading in {"Feed-forward": "Feed-forward network of decoder block 1", "Map": "The space"}.items():
            view(name, heading)
        view("Writing", "Token by token")
        page.get_by_role("button", name="Write the likeliest").click()
        page.wait_for_selector(".token:not(.source) >> nth=4")
        assert page.input_value("#target") == "ram" + pairs.text_of(pairs.predictions[-1].top[0][0])
        view("Checks", "Self-checks")
        page.locator("#view .good").nth(7).wait_for()

        page.select_option("#model", "experts")
        page.locator(".token.source").first.wait_for(state="detached")
        assert page.locator(".token.source").count() == 0 and page.locator("#target").is_hidden()
        view("Feed-forward", "Feed-forward network of block")
        block = page.get_by_label("Block").input_value()
        shown = page.locator("#view tbody").first.locator("tr").first.locator("td").all_inner_texts()[1:]
        chosen = mixture[f"blocks.{block}.feed_forward.router.chosen"][0].tolist()
        assert [int(cell.split(":")[0]) for cell in shown] == chosen
        browser.close()
    assert wrong == []
