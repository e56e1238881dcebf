"""The page's picture: what it shows are the numbers of the trace, and it is used by mouse, by keyboard and by link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

from sheepop.checkpoint import LoadedModel
from sheepop.interpret.journey import MOST_TOKENS, journey_of
from sheepop.interpret.trace import Trace
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer import CharTokenizer

from .conftest import KINDS, Live, model_of, tiny_network
from .test_inside import chromium, left_by_keys, needs_axe, violations

httpx = pytest.importorskip("httpx")
TEXT = "The sheep"


def test_the_picture_has_the_numbers_of_the_trace() -> None:
    trace = Trace.of(tiny_network(), CharTokenizer(), TEXT)
    found = journey_of(trace, 5)
    for layer in range(2):
        block = f"blocks.{layer}"
        middle = trace.residuals[layer] + trace[f"{block}.attention_output"]
        torch.testing.assert_close(found.stream[2 * layer], trace.residuals[layer][:, found.channels])
        torch.testing.assert_close(found.stream[2 * layer + 1], middle[:, found.channels])
        mean = torch.stack([trace[f"{block}.attention.weights"][head] for head in range(4)]).mean(0)
        torch.testing.assert_close(found.weights[layer], mean)
    torch.testing.assert_close(found.stream[-1], trace.residuals[-1][:, found.channels])
    logit = float(trace.logits_behind(5).max())
    assert found.winner == int(trace.logits_behind(5).argmax()) and sum(found.adds.values()) == pytest.approx(logit)
    # What the feed-forward network of a block adds is its output through the frozen norm and the row of the winner.
    scale = (trace.residuals[-1][5].double().var(correction=0) + trace.config.norm_eps).sqrt()
    added = trace["blocks.1.feed_forward_output"][5].double()
    row = trace.model.lm_head.weight[found.winner].detach().double() * trace.model.final_norm.weight.detach().double()
    expected = float((added - added.mean()) / scale @ row)
    assert found.adds["forward.1"] == pytest.approx(expected)


def test_a_giant_channel_is_named_and_leaves_the_others_their_colour() -> None:
    model = build_model(ModelConfig(vocab_size=128, d_model=128, num_layers=2, num_heads=2, max_seq_len=64), 3).eval()
    plain = Trace.of(model, CharTokenizer(), TEXT)
    with torch.no_grad():
        model.embedding.weight[:, 77] += 500.0 * plain.residuals[-1].std() * torch.tensor([1.0, -1.0]).repeat(64)
    trace = Trace.of(model, CharTokenizer(), TEXT)
    found = journey_of(trace, -1)
    expected = np.sort(trace.residuals.abs().numpy(), axis=-1)[..., 126]  # one number of 128 is larger
    np.testing.assert_allclose(found.scale[::2].numpy(), expected, rtol=1e-6)
    giant = found.channels.index(77)
    middle = trace.residuals[0] + trace["blocks.0.attention_output"]
    np.testing.assert_allclose(found.scale[1].numpy(), np.sort(middle.abs().numpy(), axis=-1)[:, 126], rtol=1e-6)
    assert found.giants == {77: pytest.approx(float((found.stream[..., giant].abs() / found.scale).max()))}
    assert found.giants[77] > 100
    others = [place for place in range(8) if place != giant]
    assert float((found.stream[..., others].abs() / found.scale[..., None]).mean()) > 0.1
    assert journey_of(plain, -1).giants == {}


@pytest.mark.parametrize("kind", KINDS)
def test_other_networks_have_a_picture_too(kind: str) -> None:
    trace = Trace.of(tiny_network(**KINDS[kind]), CharTokenizer(), TEXT, "ram" if kind == "pairs" else None)
    found = journey_of(trace, -1)
    assert found.stream.shape[:2] == (5, trace.num_tokens)
    torch.testing.assert_close(
        found.stream[1], trace["blocks.0.upper_middle" if kind == "pairs" else "blocks.0.middle"][:, found.channels]
    )
    assert sum(found.adds.values()) == pytest.approx(float(trace.logits_behind(-1).max()), rel=1e-5)


def test_a_long_text_is_seen_through_a_window() -> None:
    trace = Trace.of(tiny_network(), CharTokenizer(), "ab" * 100)
    found = journey_of(trace, 120)
    assert (found.start, found.stream.shape[1]) == (121 - MOST_TOKENS, MOST_TOKENS)
    inside = slice(found.start, found.start + MOST_TOKENS)
    torch.testing.assert_close(found.weights[1], trace["blocks.1.attention.weights"].mean(0)[inside, inside])
    assert journey_of(trace, 199, 190).stream.shape[1] == 10
    with pytest.raises(IndexError):
        journey_of(trace, 200)


@pytest.fixture(scope="module")
def inside() -> Iterator[Live]:
    server = Live(ServerConfig(ui=True), models=["plain", "pairs"])
    yield server
    server.close()


def test_a_window_out_of_range_is_refused(inside: Live) -> None:
    with httpx.Client(base_url=f"{inside.url}/ui", timeout=30) as client:
        number = client.post("/traces", json={"prompt": TEXT, "model": "plain"}).json()["number"]
        for settings, status in (
            ({"position": 9}, 400),
            ({"position": 0, "start": 9}, 400),
            ({"position": 8, "start": 2}, 200),
        ):
            assert client.get(f"/traces/{number}/journey", params=settings).status_code == status


@pytest.fixture(scope="module")
def network(inside: Live) -> Transformer:
    """The network behind the page."""
    found: Transformer = model_of(inside.registry, "plain").generator.model
    return found


@pytest.fixture(scope="module")
def browser(network: Transformer) -> Iterator[Any]:
    # The network comes first: with Playwright a loop of events runs in this thread.
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, inside: Live) -> Iterator[Any]:
    """A page that may report no error and ask nobody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith("http://127.0.0.1:") else wrong.append(asked.url))
    yield page
    context.close()
    assert wrong == []


def colour_of(value: float, scale: float, hues: dict[str, list[int]]) -> list[int]:
    at = np.sign(value) * np.sqrt(min(1.0, abs(value) / scale))
    end = hues["minus"] if at < 0 else hues["plus"]
    return [round(low + (high - low) * abs(at)) for low, high in zip(hues["none"], end, strict=True)]


@pytest.mark.system
def test_the_first_screen_shows_the_trace_and_a_changed_weight(page: Any, inside: Live, network: Transformer) -> None:
    address = f"{inside.url}/ui#model=plain&prompt=The+sheep"

    def look() -> tuple[list[str], dict[str, float]]:
        found = journey_of(Trace.of(network, CharTokenizer(), TEXT), -1)
        trace = Trace.of(network, CharTokenizer(), TEXT)
        page.wait_for_selector(".journey-picture .add")
        # The middle of a strip between two stations has the colour of its number.
        hues = page.evaluate("import('/ui/draw.js').then((draw) => draw.hueOf('residual'))")
        pixels = page.evaluate(
            """() => { const at = document.querySelector('.journey-picture').at;
            const canvas = document.querySelector('.ribbons canvas'), copy = document.createElement('canvas');
            [copy.width, copy.height] = [canvas.width, canvas.height];
            const pen = copy.getContext('2d', { willReadFrequently: true });
            pen.drawImage(canvas, 0, 0);
            return [0, 1, 4].map((p) => [2, 7].map((t) => [0, 5].map((k) => {
              const x = (at.stations[p].x + at.stations[p + 1].x) / 2;
              const y = at.ys[t] - at.ribbon / 2 + ((k + 0.5) * at.ribbon) / 8;
              return [...pen.getImageData(x, y, 1, 1).data].slice(0, 3);
            }))); }"""
        )  # fmt: skip
        for point, row in zip((0, 1, 4), pixels, strict=True):
            for token, strips in zip((2, 7), row, strict=True):
                for channel, colour in zip((0, 5), strips, strict=True):
                    value, scale = float(found.stream[point, token, channel]), float(found.scale[point, token])
                    assert np.abs(np.subtract(colour, colour_of(value, scale, hues))).max() <= 12
        widths = {
            each.get_attribute("data-part"): float(each.get_attribute("data-width"))
            for each in page.locator(".add").all()
        }
        most = max(abs(found.adds[name]) for name in widths)
        assert widths == pytest.approx({name: 16 * abs(found.adds[name]) / most for name in widths}, abs=1e-3)
        arcs = {
            (each.get_attribute("data-layer"), each.get_attribute("data-from")): float(
                each.get_attribute("data-weight")
            )
            for each in page.locator(".arcs .looks").all()
        }
        mean = {
            (str(layer), str(key)): float(weight)
            for layer in range(2)
            for key, weight in enumerate(found.weights[layer][-1])
        }
        assert arcs == pytest.approx({place: weight for place, weight in mean.items() if weight >= 0.02}, rel=1e-3)
        shares = [float(each.get_attribute("data-probability")) for each in page.locator(".odd .bar").all()]
        assert shares == pytest.approx([p for _, p in trace.predictions[-1].top])
        return [str(pixels)], widths

    page.goto(address)
    before = look()
    with torch.no_grad():
        weight = network.get_parameter("blocks.1.feed_forward.down_proj.weight")
        weight[:] = weight * 0.1
    try:
        page.click("#ask button")
        page.wait_for_function(
            """old => { const found = document.querySelector('.add[data-part="forward.1"]');
            return found && found.dataset.width !== old; }""",
            arg=f"{before[1]['forward.1']:.3f}",
        )  # fmt: skip
        after = look()
    finally:
        with torch.no_grad():
            weight[:] = weight * 10
    assert after[1]["forward.1"] < before[1]["forward.1"] and after[0] != before[0]


@pytest.mark.system
def test_a_station_opens_leads_to_its_numbers_and_escape_goes_back(page: Any, inside: Live) -> None:
    trace = Trace.of(tiny_network(), CharTokenizer(), TEXT)
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep")
    page.locator("[data-key='attention.1']").click()
    panel = page.locator(".opened")
    panel.get_by_role("heading", name="Attention of block 1").wait_for()
    weights, scores = trace["blocks.1.attention.weights"][0, -1], trace.unmasked_scores("blocks.1.attention")[0, -1]
    best = int(weights.argmax())
    assert panel.locator(".look .sum").first.inner_text() == f"q·k/√C = {float(scores[best]):.4f} →"
    assert f"{100 * float(weights[best]):.1f} %" in panel.locator(".look .weight").first.inner_text()
    # The equation has the colours of the picture.
    colours = [
        page.locator(f".opened .equations .is-{hue}").first.evaluate("each => getComputedStyle(each).color")
        for hue in ("query", "key", "value")
    ]
    assert colours == ["rgb(36, 96, 184)", "rgb(169, 75, 8)", "rgb(43, 122, 61)"]
    link = page.url
    assert "open=attention.1" in link and "layer=1" in link
    panel.get_by_role("button", name="The exact numbers").click()
    page.locator("#view h2", has_text="Attention of block 1").first.wait_for()
    page.keyboard.press("Escape")
    panel.wait_for()
    page.keyboard.press("Escape")
    panel.wait_for(state="detached")
    assert "open=" not in page.url
    page.goto("about:blank")
    page.goto(link)
    panel.get_by_role("heading", name="Attention of block 1").wait_for()


@pytest.mark.system
def test_the_picture_is_one_tab_stop_in_which_arrows_move(page: Any, inside: Live) -> None:
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep")
    page.wait_for_selector(".journey-picture .station")
    assert page.locator(".journey-picture [tabindex='0']").count() == 1
    page.locator("[data-key='embedding']").focus()
    here = "document.activeElement.dataset.key"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(here) == "attention.0"
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("[data-key='token.7'][aria-pressed=true]")
    page.wait_for_function(f"{here} === 'attention.0'")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Attention of block 0").wait_for()
    # Pointing at a token shows its arcs in every block: where it looks, and who looks at it.
    page.locator("[data-key='token.3']").hover()
    layers = {each.get_attribute("data-layer") for each in page.locator(".arcs .found").all()}
    assert layers == {"0", "1"} and set(
        page.locator(".arcs .found").evaluate_all("all => all.map((each) => each.dataset.from)")
    ) == {"3"}


@pytest.mark.system
@pytest.mark.parametrize("state", ["open=attention.1", "view=text", "view=attention", "view=next", "room=chat"])
def test_everything_is_reached_by_keys_alone(page: Any, inside: Live, state: str) -> None:
    page.goto("about:blank")
    page.goto(f"{inside.url}/ui#model=plain&prompt=ab&{state}")
    page.wait_for_selector("#say" if "chat" in state else "body[data-ready]")
    assert left_by_keys(page) == []
    if "room" not in state:
        tabs = page.get_by_role("tab")
        page.locator("[role=tab][aria-selected=true]").focus()
        seen = set()
        for _ in range(tabs.count()):
            before = page.evaluate("document.activeElement.textContent")
            page.keyboard.press("ArrowRight")
            page.wait_for_function(
                "old => document.activeElement.role === 'tab' && document.activeElement.textContent !== old", arg=before
            )
            seen.add(page.evaluate("document.activeElement.textContent"))
        assert seen == set(tabs.all_inner_texts())


@pytest.mark.system
def test_the_tour_goes_through_eight_parts_and_is_resumed(page: Any, inside: Live) -> None:
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep")
    titles, stations = [], []
    page.get_by_role("button", name="Take the tour").click()
    for step in range(1, 9):
        page.get_by_text(f"{step} of 8").wait_for()
        titles.append(page.locator(".explain h2").inner_text())
        stations.append(page.evaluate("document.querySelector('[aria-expanded=true].station')?.dataset.key ?? null"))
        if step == 5:
            page.get_by_role("button", name="Leave the tour").click()
            page.get_by_role("button", name="Take the tour").wait_for()
            page.evaluate("localStorage.setItem('tour', 5)")
            page.reload()
            page.get_by_role("button", name="Resume the tour at 5 of 8").click()
            page.get_by_text("5 of 8").wait_for()
        if step < 8:
            page.get_by_role("button", name="Next", exact=True).click()
    assert [title.split()[0] for title in titles] == [
        "Tokens",
        "Embedding",
        "Attention",
        "Heads",
        "Feed-forward",
        "Residual",
        "Prediction",
        "Writing",
    ]
    assert stations == [None, "embedding", None, "attention.0", "forward.0", None, "prediction", None]
    assert "tour=8" in page.url
    page.get_by_role("button", name="Done").click()
    page.get_by_role("button", name="Take the tour").wait_for()


@pytest.mark.system
def test_play_writes_what_the_model_would_and_pause_stops(page: Any, inside: Live, network: Transformer) -> None:
    trace = Trace.of(network, CharTokenizer(), TEXT)
    expected = trace.predictions[-1].top[0][0]
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep")
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Step").click()
    assert page.locator(".station.lit").get_attribute("data-key") == "embedding"
    page.get_by_role("button", name="Step").click()
    assert page.locator(".station.lit").get_attribute("data-key") == "attention.0"
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector("[data-key='token.10']")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Play").wait_for()
    ids = [int(each) for each in page.evaluate("new URLSearchParams(location.hash.slice(1)).get('ids')").split(",")]
    assert ids[:10] == [*trace.token_ids, expected]
    second = Trace.of(network, CharTokenizer(), ids[:10])
    assert ids[10] == second.predictions[-1].top[0][0]


@pytest.mark.system
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_state_of_the_picture_breaks_a_rule_of_accessibility(page: Any, inside: Live, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for state in (
        "",
        "&open=attention.1&layer=1",
        "&open=prediction",
        "&open=forward.0&tour=5",
        "&view=attention",
        "&view=next",
    ):
        page.goto("about:blank")
        page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep{state}")
        page.wait_for_selector("body[data-ready]")
        assert violations(page) == []


@pytest.mark.system
@pytest.mark.parametrize(
    "text", ["a", "\u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f469\u200d\U0001f466", "x" * 256]
)
def test_any_text_has_a_picture_that_fits(page: Any, inside: Live, text: str) -> None:
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("about:blank")
        page.goto(f"{inside.url}/ui#" + urlencode({"model": "plain", "prompt": text}))
        page.wait_for_selector(".journey-picture .name")
        length = Trace.of(tiny_network(), CharTokenizer(), text).num_tokens
        assert page.locator(".journey-picture .name").count() == min(length, MOST_TOKENS)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    if length > MOST_TOKENS:
        page.get_by_role("button", name="Earlier").click()
        page.wait_for_selector(f"[data-key='token.{length - 2 * MOST_TOKENS}']")


# Networks at the edge of what is sensible, as narrow as their other sizes allow.
ODD: dict[str, dict[str, Any]] = {
    "deep": {"num_layers": 40, "num_heads": 64, "d_model": 128},
    "long": {"max_seq_len": 4096, "num_layers": 1, "num_heads": 1},
    "vast": {"vocab_size": 262_144},
    "wordy": {},
}


class Wordy(CharTokenizer):
    """Every token is a label of 300 letters, of 300 letters that are written from right to left, or of 300 emoji."""

    def token_bytes(self, token_id: int) -> bytes:
        return 300 * ("s", "\u05e9", "\U0001f411")[token_id % 3].encode()


def odd_network(name: str) -> Transformer:
    sizes = {"vocab_size": 128, "d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 256, "dropout": 0.0}
    return build_model(ModelConfig(**{**sizes, **ODD[name]}, position_encoding="rope"), 4).eval()


@pytest.fixture(scope="module")
def odd() -> Iterator[Live]:
    config = ServerConfig(ui=True)

    def load(name: str) -> ServedModel:
        model = odd_network(name)
        tokenizer = Wordy() if name == "wordy" else CharTokenizer()
        loaded = LoadedModel(model, tokenizer, model.config, {}, Path(), ())
        return ServedModel(name, loaded, config, cache_bytes=None)

    server = Live(config, models=list(ODD), load=load)
    yield server
    server.close()


@pytest.mark.system
def test_labels_of_300_characters_are_shortened_and_whole_on_hover(page: Any, odd: Live) -> None:
    letters = "s\u05e9\U0001f411"
    for width, shown in ((1280, zip("abc", (4, 4, 12), strict=True)), (390, zip("abc", (1, 1, 5), strict=True))):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("about:blank")
        page.goto(f"{odd.url}/ui#model=wordy&prompt=abc")
        page.wait_for_selector(".journey-picture .odd")
        expected = [f"\u2068{count * letters[ord(each) % 3]}…\u2069" for each, count in shown]
        assert page.locator(".journey-picture .name text").all_text_contents() == expected
        whole = [
            f"Token {place}, id {ord(each)}: \u2068{300 * letters[ord(each) % 3]}\u2069"
            for place, each in enumerate("abc")
        ]
        assert page.locator(".journey-picture .name title").all_text_contents() == whole
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # No label is cut at the edge of the picture.
        page.evaluate("document.fonts.ready.then(() => null)")
        edges = page.evaluate(
            """() => [...document.querySelectorAll('.journey-picture .name text, .journey-picture .word')]
              .map((each) => [each.getBoundingClientRect().left, each.getBoundingClientRect().right])"""
        )
        assert [edge for edge in edges if edge[0] < 0 or edge[1] > width] == []
    page.locator("[data-key='token.1']").hover()
    page.locator("[data-key='attention.1']").click()
    page.locator(".opened .look").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.system
def test_forty_blocks_of_64_heads_fit_and_one_unfolds(page: Any, odd: Live) -> None:
    sizes: list[int] = []
    page.on("response", lambda got: sizes.append(len(got.body())) if "/journey" in got.url else None)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("about:blank")
        page.goto(f"{odd.url}/ui#model=deep&prompt={'ab' * 40}&open=attention.39&layer=39")
        page.locator(".opened .heads button").nth(63).wait_for()
        assert page.locator(".journey-picture .station").count() == 82
        assert page.locator(".journey-picture .name").count() == MOST_TOKENS
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        blocks = page.evaluate("document.querySelector('.journey-picture').at.blocks.map((block) => block.width)")
        assert blocks[39] > 3 * blocks[0] and len(blocks) == 40
    # Of a row of weights the zeros of later tokens are left out: 40 layers have 40 * 60 * 61 / 2 of them.
    assert max(sizes) < 40 * 60 * 61 / 2 * 9 + 81 * 60 * 8 * 12


@pytest.mark.system
def test_a_text_of_4096_tokens_scrolls_and_its_stations_open(page: Any, odd: Live) -> None:
    text = "".join("ab"[(place * place) % 7 % 2] for place in range(4096))
    trace, sizes = Trace.of(odd_network("long"), CharTokenizer(), text), list[int]()
    page.on("response", lambda got: sizes.append(len(got.body())) if "/journey" in got.url else None)
    page.goto(f"{odd.url}/ui#model=long&prompt={text}&open=attention.0")
    weights = trace["blocks.0.attention.weights"][0, -1]
    page.locator(".opened .look .weight").first.wait_for()
    assert f"{100 * float(weights.max()):.2f} %" in page.locator(".opened .look .weight").first.inner_text()
    page.get_by_role("button", name="Earlier").click()
    page.wait_for_selector(f"[data-key='token.{4096 - 2 * MOST_TOKENS}']")
    assert page.locator(".journey-picture .name").count() == MOST_TOKENS and max(sizes) < 60_000


@pytest.mark.system
def test_a_vocabulary_of_262144_words_and_a_model_reloaded_while_the_picture_plays(page: Any, odd: Live) -> None:
    page.goto(f"{odd.url}/ui#model=vast&prompt=The+sheep")
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    assert httpx.post(f"{odd.url}/ui/reload", timeout=30).status_code == 200
    page.wait_for_selector("[data-key='token.10']")
    page.get_by_role("button", name="Pause").click()
    ids = [int(each) for each in page.evaluate("new URLSearchParams(location.hash.slice(1)).get('ids')").split(",")]
    trace = Trace.of(odd_network("vast"), CharTokenizer(), TEXT)
    assert ids[9] == int(trace.logits_behind(-1).argmax())
    page.get_by_role("tab", name="Writing").click()
    page.get_by_text("numbers a token").first.wait_for()


@pytest.mark.system
def test_two_tabs_play_their_own_texts(page: Any, inside: Live) -> None:
    other = page.context.new_page()
    for each, text in ((page, "The+sheep"), (other, "A+ram")):
        each.goto(f"{inside.url}/ui#model=plain&prompt={text}")
        each.get_by_label("Speed").select_option("4")
        each.get_by_role("button", name="Play").click()
    for each, text in ((page, "The sheep"), (other, "A ram")):
        each.wait_for_selector(f"[data-key='token.{len(text)}']")
        each.get_by_role("button", name="Pause").click()
        assert each.input_value("#prompt").startswith(text)


@pytest.mark.system
def test_with_reduced_motion_the_light_jumps_between_stations(page: Any, inside: Live) -> None:
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep")
    page.get_by_role("button", name="Play").click()
    found = page.evaluate(
        """() => new Promise((done) => {
        const places = new Set(), at = document.querySelector('.journey-picture').at;
        const look = (count) => {
          const light = new DOMMatrix(getComputedStyle(document.querySelector('.light')).transform);
          places.add(Math.round(light.m41 + 9));
          if (count) requestAnimationFrame(() => look(count - 1));
          else done([[...places], at.stations.map((each) => Math.round(each.x + each.width / 2))]);
        };
        look(90);
        })"""
    )
    page.get_by_role("button", name="Pause").click()
    assert len(found[0]) > 1 and set(found[0]) <= set(found[1])


@pytest.mark.system
def test_the_tab_key_reaches_everything(page: Any, inside: Live) -> None:
    page.goto(f"{inside.url}/ui#model=plain&prompt=The+sheep&open=attention.1&layer=1")
    page.locator(".opened .heads").wait_for()
    page.evaluate("document.activeElement.blur()")
    here = """() => { const at = document.activeElement;
    return at.dataset.key ?? (at.id || at.getAttribute('aria-label') || at.textContent); }"""
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(here))
    assert {
        "prompt", "Trace", "model", "Reload", "Journey", "bar.To the next station", "Speed", "attention.1", "exact",
        "close", "head.0", "The query of p: 8 numbers as colours; arrow keys read them.", "save",
        "tour.Take the tour",
    } <= set(reached)  # fmt: skip
    # A grid of buttons is one tab stop, in which the arrows move.
    assert "head.1" not in reached
    page.locator("[data-key='head.0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(here) == "head.1"
    page.get_by_role("tab", name="Lens").click()
    page.locator(".lens button").first.wait_for()
    assert page.locator(".lens button").count() == 27 and page.locator(".lens button[tabindex='0']").count() == 1
    page.locator(".lens button").nth(4).focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("[...document.querySelectorAll('.lens button')].indexOf(document.activeElement)") == 13
