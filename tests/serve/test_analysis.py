"""The page's analyses have the numbers of `lm.analyze`, refuse what cannot be analysed, and end when readers leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.core.json_lines import read_json_lines
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.advice import advice_of
from sheepop.interpret.control.analyses import Analyses
from sheepop.jobs.config import load_config
from sheepop.serve.analysis import Analysis, AnalysisRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer import CharTokenizer

from ..running import train
from .conftest import Live, tiny_network, wait_for
from .conftest import tiny as served
from .test_inside import BROWSER, left_by_keys

httpx = pytest.importorskip("httpx")
PROMPT = "Sheep"


@pytest.fixture(scope="module")
def run(text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured its stability."""
    place = tmp_path_factory.mktemp("runs") / "measured"
    more = ("training.max_steps=6", "analysis.quantities=[sharpness,noise,layers]", "analysis.interval=2")
    train(load_config(overrides=(*tiny, "device=cpu", f"data.paths={text_folder}", f"output_dir={place}", *more)))
    return place


@pytest.fixture(scope="module")
def live(run: Path) -> Iterator[Live]:
    config = ServerConfig(ui=True)

    def load(name: str) -> ServedModel:
        model = served(name, CharTokenizer(), config, seed=5 if name == "other" else 4)
        if name == "broken":
            with torch.no_grad():
                model.generator.model.get_parameter("blocks.1.attention.q_proj.weight")[0, 0] = torch.nan
        return model

    server = Live(config, {"measured": run}, models=["plain", "other", "pairs", "broken"], load=load)
    yield server
    server.close()


def ask(live: Live, **body: Any) -> list[dict[str, Any]]:
    """The results of an analysis; an error is the last one."""
    asked = {"model": "plain", "prompt": PROMPT, **body}
    with httpx.stream("POST", f"{live.url}/ui/analyses", json=asked, timeout=60) as response:
        assert response.status_code == 200, response.read()
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    return [event.get("result", event) for event in events]


def test_the_numbers_are_those_of_the_analyses(live: Live) -> None:
    first, second = (Analyses(tiny_network(seed), CharTokenizer()) for seed in (4, 5))
    settings = GenerationConfig(temperature=0.5)
    for body, expected in (
        ({"analysis": "gains"}, [first.gains(PROMPT)]),
        ({"analysis": "influence", "prompt": [84, 104, 101]}, [first.influence("The")]),
        ({"analysis": "blocks", "layer": 1}, [first.blocks(PROMPT, layer=1)]),
        ({"analysis": "compare", "other": "other"}, [first.compare(second, PROMPT)]),
        (
            {"analysis": "decode", "temperature": 0.5, "length": 8, "prompt": "The"},
            [first.decode("The", settings, length=8, pairs=4)],
        ),
        ({"analysis": "influence", "prompt": "T"}, [first.influence("T")]),
    ):
        assert ask(live, **body) == json.loads(json.dumps([each.to_dict() for each in expected])), body
    written = [asdict(each) for each in first.writing(PROMPT, settings, length=6)]
    assert ask(live, analysis="writing", temperature=0.5, length=6) == written and len(written) == 6


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": "pairs"}, "An encoder-decoder has two streams"),
        ({"model": "broken"}, "blocks.1.attention.q_proj.weight has 1 number that is not finite"),
        ({"model": "none"}, "no model 'none'"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "x" * 129}, "129 tokens, and this room reads 128. Shorten it, or use `sheepop analyze gains`"),
        ({"analysis": "blocks", "layer": 2}, "--layer 2 does not exist"),
        ({"analysis": "compare", "other": "pairs"}, "An encoder-decoder"),
    ],
)
def test_what_cannot_be_analysed_is_refused_in_words(live: Live, body: dict[str, Any], problem: str) -> None:
    (found,) = ask(live, **{"analysis": "gains", **body})
    assert problem in found["error"]["message"]


def test_bad_requests_and_other_sites_get_nothing(live: Live) -> None:
    for body in ({"analysis": "gain"}, {"temperature": -1}, {"path": "/etc"}, {"length": 10**6}):
        asked = {"model": "plain", "prompt": "a", "analysis": "writing", **body}
        assert httpx.post(f"{live.url}/ui/analyses", json=asked).status_code == 400
    asked = {"model": "plain", "prompt": "a", "analysis": "gains"}
    evil = {"Origin": "http://evil.example"}
    assert httpx.post(f"{live.url}/ui/analyses", json=asked, headers=evil).status_code == 403


def test_an_analysis_ends_when_its_reader_leaves_and_more_than_three_are_refused(live: Live) -> None:
    """Each would write 246 tokens and measure every one of them."""
    asked = {"model": "plain", "prompt": PROMPT, "analysis": "writing", "length": 246}
    client = httpx.Client(base_url=live.url, timeout=60)
    streams = [client.stream("POST", "/ui/analyses", json=asked) for _ in range(3)]
    opened = [stream.__enter__() for stream in streams]
    try:
        lines = opened[0].iter_lines()
        assert "result" in next(lines)
        (refused,) = ask(live, analysis="gains")
        assert "Too many requests" in refused["error"]["message"]
        assert client.get("/health").json() == {"status": "ok"} and live.registry.num_open == 3
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
        client.close()
    wait_for(lambda: live.registry.num_open == 0)
    assert len(ask(live, analysis="writing", length=2)) == 2


def test_a_server_that_closes_ends_its_analysis(live: Live) -> None:
    analysis = Analysis(live.registry)

    async def read() -> int:
        asked = AnalysisRequest(model="plain", prompt=PROMPT, analysis="writing", length=246)
        found = 0
        async for text in (await analysis.analyse(asked)).body_iterator:
            found += '"result"' in str(text)
            if found == 1:
                analysis.close()
        return found

    assert 1 <= asyncio.run(read()) < 246


def test_advice_is_that_of_the_run(live: Live, run: Path) -> None:
    rows = read_json_lines(run / "metrics.jsonl").rows
    found = httpx.get(f"{live.url}/ui/runs/measured/advice").json()
    measured = [row for row in rows if row["split"] == "analysis"]
    assert [row["step"] for row in found["measured"]] == [2, 4, 6] and found["measured"] == measured
    assert [each["cause"] for each in found["advice"]] == [each.cause for each in advice_of(rows)]


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
def test_every_view_shows_the_numbers(live: Live, run: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    analyses = Analyses(tiny_network(), CharTokenizer())
    gains, influence = analyses.gains(PROMPT), analyses.influence(PROMPT)
    blocks, written = analyses.blocks(PROMPT), "".join(each.text for each in analyses.writing(PROMPT, length=32))
    changes = analyses.compare(Analyses(tiny_network(5), CharTokenizer()), PROMPT)
    measured = [row for row in read_json_lines(run / "metrics.jsonl").rows if row["split"] == "analysis"]
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, wrong = browser.new_page(viewport={"width": 400, "height": 800}), list[str]()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(live.url) else wrong.append(asked.url))

        def show(view: str, more: str = "") -> None:
            page.goto("about:blank")
            page.goto(f"{live.url}/ui#room=analysis&view={view}&model=plain&prompt=Sheep{more}")
            page.wait_for_selector(f"body[data-ready={view}]")
            assert page.evaluate("document.documentElement.scrollWidth") <= 400

        def cells(row: int) -> list[str]:
            found: list[str] = page.locator(".picture-side tbody tr").nth(row).locator("td").all_inner_texts()
            return found

        show("gains")
        first = gains.blocks[0]
        assert [float(each) for each in cells(0)[1:]] == pytest.approx(
            [first.block.largest, *(part.largest for part in first.parts)], rel=5e-3
        )
        before = cells(0)[1]
        page.get_by_label("Show").select_option("typical")
        page.wait_for_function(
            "old => { const at = document.querySelector('.heat td + td'); return at && at.innerText !== old; }",
            arg=before,
        )
        assert "what=typical" in page.url and float(cells(1)[1]) == pytest.approx(
            gains.blocks[1].block.typical.value, rel=5e-3
        )

        show("influence", "&token=4")
        shares = [float(measure[4, 2]) for measure in influence.shares.values()]
        told = page.locator(".three .bars > span:last-child, .three .bars > span:nth-child(3n)").nth(2).inner_text()
        found = [float(each.split(" ")[0]) for each in told.split(";")[0].split(", ")]
        assert found == pytest.approx([100 * each for each in shares], abs=0.06)
        page.locator("canvas").first.click(position={"x": 4, "y": 4})
        page.wait_for_selector("text=What reaches S")
        assert "token=0" in page.url

        show("loop")
        assert page.locator("pre").inner_text() == written
        show("blocks", "&step=c")
        boxes = page.locator(".diagram svg text.strong").all_text_contents()
        assert boxes == ["G_in", "G_blocks", "output"]
        page.get_by_role("button", name="(e) the loop of writing").click()
        page.wait_for_selector(f"text=largest {blocks.closed_loop.largest:.3g}")
        assert "step=e" in page.url
        show("compare", "&beside=other")
        told = page.locator(".bars > span:nth-child(3)").first.inner_text()
        assert [float(each) for each in told.split(", then ")] == pytest.approx(
            [changes.first[0].largest, changes.second[0].largest], rel=5e-3
        )
        page.goto("about:blank")
        page.goto(f"{live.url}/ui#room=analysis&view=training&run=measured")
        page.get_by_label("Measurement").last.fill("0")
        page.wait_for_selector(f"text={measured[0]['sharpness_share']:.2f} of the limit at step 2")
        page.wait_for_selector(".uplot")
        page.locator("h1").click()  # Tab goes on from here
        assert left_by_keys(page) == []
        browser.close()
    assert wrong == []
