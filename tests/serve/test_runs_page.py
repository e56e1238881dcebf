"""The page's endpoints for runs: rows, texts, traces and documents are those on disk, and votes are saved there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import CheckpointError
from sheepop.core.json_lines import read_json_lines
from sheepop.data.corpus import Corpus
from sheepop.interpret.journey import journey_of
from sheepop.interpret.store import StoredTrace
from sheepop.interpret.trace import Trace
from sheepop.jobs import snapshots
from sheepop.jobs.config import load_config
from sheepop.jobs.data import show_step
from sheepop.jobs.serve import WatchedRuns
from sheepop.posttrain.rows import Preference, read_rows
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.tokenizer import CharTokenizer

from ..running import train
from .conftest import Live, Shelf, tiny
from .test_inside import chromium, floats, left_by_keys, needs_axe, violations

httpx = pytest.importorskip("httpx")
STEPS = (
    "training.max_steps=6",
    "training.sample_interval=2",
    "training.sample_prompts=['Sheep jump']",
    "training.eval_interval=3",
    "trace.prompt=Sheep",
)


@pytest.fixture(scope="module")
def runs(text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs, the first of which traced a prompt."""
    place = tmp_path_factory.mktemp("runs")
    for name, more in (("first", STEPS), ("second run", ("training.max_steps=2", "training.learning_rate=0.01"))):
        places = ("device=cpu", f"data.paths={text_folder}", f"output_dir={place / name}", "training.log_interval=1")
        train(load_config(overrides=(*tiny, *places, *more)))
    return {name: place / name for name in ("first", "second run")}


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("votes") / "votes.jsonl"


@pytest.fixture(scope="module")
def watching(runs: dict[str, Path], votes: Path) -> Iterator[Live]:
    server = Live(ServerConfig(ui=True, votes=str(votes)), runs)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(watching: Live) -> Iterator[Any]:
    with httpx.Client(base_url=f"{watching.url}/ui", timeout=30) as found:
        yield found


def test_what_is_shown_is_what_the_run_wrote(client: Any, runs: dict[str, Path]) -> None:
    assert client.get("/runs").json() == ["first", "second run"]
    summary = client.get("/runs/first").json()
    run = RunDirectory.open(runs["first"])
    assert (summary["state"], summary["steps"], summary["pages"]) == ("finished", 6, ["run", "corpus"])
    run.plan.write_text("<h1>Planned</h1>")
    assert client.get("/runs/first").json()["pages"] == ["run", "plan", "corpus"]
    assert "measured nothing while it trained" in client.get("/runs/first/advice").text
    assert client.get("/runs/first/metrics").json()["rows"] == read_json_lines(run.metrics_file)[0]
    assert client.get("/runs/first/samples").json() == read_json_lines(run.samples_file)[0]
    origins = client.get("/runs/first/steps/3").json()
    expected = [{"row": row, **asdict(origin)} for row, origin in show_step(run.path, 3)][: len(origins)]
    assert origins == json.loads(json.dumps(expected))
    assert origins[0]["file"].endswith(".txt") and "Sheep number" in "".join(origin["text"] for origin in origins)
    held_out = Corpus.open(run.corpus, verify=False).documents("validation", 0, 1)
    assert next(iter(held_out)).text.startswith(client.get("/runs/first/prompt").json())
    differences = client.get("/differences").json()
    assert differences["runs"] == ["first", "second run"] and differences["warning"] is None
    assert differences["settings"]["training.max_steps"] == [6, 2]


def test_what_a_corpus_lost_comes_in_pages_and_can_be_searched(tmp_path: Path, tiny: tuple[str, ...]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(15):
        (texts / f"{number:02}.bin").write_bytes(bytes(range(256)) * 4)
    (texts / "a.txt").write_text("Sheep eat grass on the hill. " * 40)
    (texts / "b.txt").write_text("Sheep eat grass on the hill. " * 40)
    (texts / "c.txt").write_text("Goats climb rocks above the lake. " * 40)
    places = (
        "device=cpu",
        f"data.paths={texts}",
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=1",
        "data.clean.stages=[exact_duplicates]",
    )
    run = train(load_config(overrides=(*tiny, *places))).run
    watched = WatchedRuns({"run": run})
    report, first = watched.corpus("run"), watched.lost("run")
    assert report["files"]["skipped"] == {"binary": 15} and report["inputs"] == ["texts"]
    assert len(first["rows"]) == 12 and not first["is_last"]
    second = watched.lost("run", 12)
    names = [row["file"] for row in (*first["rows"], *second["rows"])]
    assert second["is_last"] and sorted(names) == sorted([*(f"{number:02}.bin" for number in range(15)), "b.txt"])
    (copy,) = watched.lost("run", 0, "DUPLICATES")["rows"]
    assert copy["file"] == "b.txt" and watched.lost("run", 0, "no such thing")["rows"] == []


def test_traces_over_time_are_those_on_the_disk(client: Any, runs: dict[str, Path]) -> None:
    assert client.get("/runs/first/traces").json() == [0, 2, 4, 6]
    assert client.get("/runs/second%20run/traces").json() == []
    stored = StoredTrace.open(runs["first"] / "traces" / "step-00000004")
    found = client.get("/runs/first/traces/4").json()
    assert found["prompt"] == "Sheep" and found["tensors"]["blocks.0.attention.weights"] == [2, 5, 5]
    assert {int(each) for each in found["words"]} == {each for row in found["predictions"] for each, _ in row["top"]}
    name = "blocks.0.attention.weights"
    head = client.get("/runs/first/traces/4/tensor", params={"tensor": name, "head": 1})
    np.testing.assert_array_equal(floats(head), stored.read(name, 1).numpy())
    whole = client.get("/runs/first/traces/4/tensor", params={"tensor": "residuals"})
    np.testing.assert_array_equal(floats(whole), stored.read("residuals").numpy())


@pytest.mark.parametrize(
    ("name", "source", "steps"), [("first", "traces", [0, 2, 4, 6]), ("second run", "checkpoints", [1, 2])]
)
def test_a_picture_of_a_step_is_that_of_its_network(
    client: Any, runs: dict[str, Path], name: str, source: str, steps: list[int]
) -> None:
    """What a stored trace shows is what the checkpoint of its step computes, channel by channel."""
    assert client.get(f"/runs/{name}/journeys").json() == {"source": source, "steps": steps}
    loaded = load_model(RunDirectory(runs[name]).checkpoint(steps[-1]))
    prompt = "Sheep" if source == "traces" else client.get(f"/runs/{name}/prompt").json()
    trace = Trace.of(loaded.model, loaded.tokenizer, prompt)
    for channels in (None, [9, 2]):
        asked = {} if channels is None else {"channels": "9,2"}
        found = client.get(f"/runs/{name}/journeys/{steps[-1]}", params=asked).json()
        expected = journey_of(trace, -1, None, channels).to_dict(trace)
        assert found["channels"] == expected["channels"]
        for token, wanted in zip(found["next"], expected["next"], strict=True):
            assert token == {**wanted, "probability": pytest.approx(wanted["probability"], rel=1e-5)}
        assert found["adds"] == pytest.approx(expected["adds"], abs=1e-5)
        np.testing.assert_allclose(found["stream"], expected["stream"], rtol=2e-3, atol=1e-5)
        assert json.dumps(found["weights"]) == json.dumps(expected["weights"])


def test_a_checkpoint_too_large_for_a_picture_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_MOST_BYTES", 10)
    assert "trace.prompt" in client.get("/runs/second run/journeys/2").json()["error"]["message"]
    assert client.get("/runs/first/journeys/2").status_code == 200  # of a stored trace


def test_a_run_is_followed_while_it_grows(configured_run: Path) -> None:
    """Reads whole lines only, and from the start again when a resumed run has removed rows."""
    watched, file = WatchedRuns({"run": configured_run}), RunDirectory(configured_run).metrics_file
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:10])
    first = watched.metrics("run", 0)
    assert first["rows"] == [json.loads(line) for line in lines[:2]] and first["offset"] == len(b"".join(lines[:2]))
    file.write_bytes(b"".join(lines))
    more = watched.metrics("run", first["offset"])
    assert more["rows"] == [json.loads(line) for line in lines[2:]] and more["is_whole"]
    assert watched.metrics("run", more["offset"])["rows"] == []
    file.write_bytes(lines[0])
    again = watched.metrics("run", more["offset"])
    assert (again["from"], again["rows"]) == (0, [json.loads(lines[0])])
    # Cut by a resumed run and grown beyond the old offset, in the middle of a line or, by chance, at the end of one.
    for resumed in (lines[0] + b'{"step": 2, "split": "train", "loss": 0.123456789}\n' * 9, b"".join(lines[::-1])):
        file.write_bytes(b"".join(lines))
        before = watched.metrics("run", 0)
        file.write_bytes(resumed + resumed)
        again = watched.metrics("run", before["offset"])
        assert again["from"] == 0 and again["rows"] == [json.loads(line) for line in (resumed + resumed).splitlines()]
    file.unlink()
    assert watched.metrics("run", 5)["rows"] == []


@pytest.fixture
def configured_run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a run that the test may change."""
    return Path(shutil.copytree(runs["first"], tmp_path / "run"))


def test_a_run_without_a_checkpoint_is_watched_and_its_model_comes_later(configured_run: Path) -> None:
    run, config = RunDirectory(configured_run), ServerConfig()
    hidden = configured_run.parent / "hidden"
    run.checkpoints.rename(hidden)
    assert not run.has_checkpoint()

    def load(name: str) -> Any:
        if not run.has_checkpoint():
            raise CheckpointError("no checkpoint yet")
        return tiny(name, CharTokenizer(), config)

    registry = Registry(Shelf(load, ["run"], config), later=["run"])
    registry.reload()
    assert registry.models() == []
    hidden.rename(run.checkpoints)
    registry.reload()
    assert [model.name for model in registry.models()] == ["run"]
    run.checkpoints.rename(hidden)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        registry.reload()
    assert [model.name for model in registry.models()] == ["run"]
    registry.close()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/runs/third", "no run 'third'. Runs: first, second run"),
        ("/runs/..%2f..%2fetc/metrics", "Not Found"),
        ("/runs/../metrics", "no file"),
        ("/runs/first/traces/3", "no trace of step 3"),
        ("/runs/first/traces/4/tensor?tensor=nothing", "no tensor 'nothing'"),
        ("/runs/first/traces/4/tensor?tensor=blocks.0.attention.weights&head=9", "no head 9"),
        ("/runs/first/journeys/9", "no picture of step 9"),
        ("/runs/first/journeys/2?channels=999", "no such channels"),
        ("/runs/first/journeys/2?channels=1,x", "not numbers"),
        ("/runs/first/steps/0", "counts from 1"),
        ("/runs/first/steps/7", "6 steps"),
        ("/runs/first/pages/config", "no page 'config'"),
    ],
)
def test_what_a_run_does_not_have_is_refused(client: Any, path: str, problem: str) -> None:
    response = client.get(path)
    assert response.status_code == 404 and problem in response.json()["error"]["message"], response.text


def test_a_report_reaches_nothing(client: Any) -> None:
    """A report has its own scripts, which can reach neither the server nor the page."""
    for kind, title in (("run", "Training"), ("plan", "Planned"), ("corpus", "Corpus")):
        response = client.get(f"/runs/first/pages/{kind}")
        policy = response.headers["content-security-policy"]
        assert title in response.text and "default-src 'none'" in policy
        assert "sandbox allow-scripts" in policy and "allow-same-origin" not in policy and "connect-src" not in policy


def test_votes_are_preferences_that_tuning_reads(client: Any, votes: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?\n"}]
    about = {"chosen_model": "a", "rejected_model": "b"}
    for vote in (
        {"prompt": "def ", "chosen": "f():\n", "rejected": "\u2028x", **about},
        {"prompt": talk, "chosen": "Hello!", "rejected": "What?", **about},
    ):
        assert client.post("/votes", json=vote).json() == str(votes)
    first, second = read_rows([votes], Preference)
    assert (first.prompt, first.chosen, first.rejected) == ("def ", "f():\n", "\u2028x")
    assert (list(second.prompt), second.chosen) == (talk, ({"role": "assistant", "content": "Hello!"},))
    for bad in (
        {},
        {"prompt": [], "chosen": "a", "rejected": "b", **about},
        {"prompt": "a", "chosen": 1, "rejected": "b"},
    ):
        assert client.post("/votes", json=bad).status_code == 400
    evil = {"Origin": "http://evil.example"}
    assert (
        client.post("/votes", json={"prompt": "a", "chosen": "b", "rejected": "c", **about}, headers=evil).status_code
        == 403
    )
    assert len(votes.read_text(encoding="utf-8").split("\n")) == 3


def test_a_vote_that_cannot_be_kept_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    server = Live(ServerConfig(ui=True, votes=str(tmp_path / "folder")), runs)
    vote = {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_model": "m", "rejected_model": "n"}
    response = httpx.post(f"{server.url}/ui/votes", json=vote)
    server.close()
    assert response.status_code == 500 and "folder" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def page(watching: Live) -> Iterator[Any]:
    """A page of a browser, in which nothing went wrong until the end."""
    with chromium() as browser:
        found = browser.new_page(viewport={"width": 1280, "height": 800})
        wrong: list[str] = []
        found.on(
            "console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None
        )
        found.on("pageerror", lambda error: wrong.append(str(error)))
        found.on("request", lambda asked: None if asked.url.startswith(watching.url) else wrong.append(asked.url))
        yield found
    assert wrong == []


# Of each line of each chart: what it draws, what its legend says, and the colour of the legend.
LINES = r"""() => {
  const found = {}, isThere = (y) => y !== undefined;
  for (const { plot } of document.querySelectorAll(".chart")) {
    for (const { line, raw, smooth, value, button } of plot.entries) found[`${plot.title}: ${line.name}`] = {
      colour: getComputedStyle(button.querySelector("i")).borderTopColor.match(/[0-9]+/g).map(Number),
      said: value.textContent, at: plot.told.textContent,
      xs: plot.data[0].filter((_, place) => isThere(plot.data[raw][place])),
      ys: plot.data[raw].filter(isThere), smooth: plot.data[smooth ?? raw].filter(isThere),
    };
  }
  return found;
}"""
# The pixel of a chart at the last point of its first line.
PIXEL = """(title) => {
  const { plot } = [...document.querySelectorAll(".chart")].find((chart) => chart.plot.title === title);
  const ys = plot.data[1], at = ys.findLastIndex((y) => y !== undefined);
  const [left, top] = [plot.valToPos(plot.data[0][at], "x", true), plot.valToPos(ys[at], "y", true)];
  return [...plot.ctx.getImageData(Math.round(left) - 1, Math.round(top), 1, 1).data].slice(0, 3);
}"""
# The place on the screen of a place of the axis, after the page has scrolled there.
PLACE = """async ([title, x]) => {
  const { plot } = [...document.querySelectorAll(".chart")].find((chart) => chart.plot.title === title);
  plot.over.scrollIntoView({ block: "center" });
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const box = plot.over.getBoundingClientRect();
  return [box.left + plot.valToPos(x, "x"), box.top + box.height / 2];
}"""


def logged(runs: dict[str, Path], name: str, split: str, key: str) -> list[float]:
    rows = read_json_lines(RunDirectory(runs[name]).metrics_file)[0]
    return [row[key] for row in rows if row["split"] == split and row.get(key) is not None]


def point_at(page: Any, title: str, x: float, *, click: bool = False) -> None:
    """Moves the pointer to a place of the axis in a chart."""
    place = page.evaluate(PLACE, [title, x])
    page.mouse.move(*place)
    if click:
        page.mouse.click(*place)


@pytest.mark.system
def test_the_curves_are_the_rows_of_the_runs(page: Any, watching: Live, runs: dict[str, Path]) -> None:
    page.goto(f"{watching.url}/ui#room=training&run=first&beside=second+run&smooth=0.9")
    page.wait_for_selector("text=step 6 ·")
    found = page.evaluate(LINES)
    losses = logged(runs, "first", "train", "loss")
    line = found["Loss: first training"]
    assert line["xs"] == logged(runs, "first", "train", "step") and line["ys"] == losses
    mean, expected = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = 0.9 * mean + (1 - 0.9) * loss
        expected.append(mean / (1 - 0.9**count))
    assert line["smooth"] == pytest.approx(expected)
    assert found["Loss: second run held-out"]["smooth"] == logged(runs, "second run", "validation", "loss")
    memory = found["Memory, MB: first"]["ys"]
    assert memory == pytest.approx([value / 1e6 for value in logged(runs, "first", "train", "memory_bytes")])
    # A colour is a run, in the legend as in the picture.
    rates = [found[f"Learning rate: {name}"] for name in runs]
    assert rates[0]["colour"] != rates[1]["colour"] == found["Loss: second run held-out"]["colour"]
    pixel = page.evaluate(PIXEL, "Learning rate")
    distances = [np.abs(np.subtract(pixel, rate["colour"])).max() for rate in rates]
    assert distances[0] < 60 < distances[1]

    # The pointer over one chart reads all of them.
    point_at(page, "Gradient norm", 4)
    found = page.evaluate(LINES)
    assert {found[f"{title}: first"]["at"] for title in ("Learning rate", "Memory, MB", "Gradient norm")} == {"step 4"}
    assert found["Loss: first training"]["said"] == f"{expected[3]:.4f} ({losses[3]:.4f})"
    assert found["Bits per byte: first"]["said"] == f"{logged(runs, 'first', 'validation', 'bits_per_byte')[0]:.4f}"

    page.get_by_role("combobox", name="Scale").select_option("logarithmic")
    places = page.evaluate(
        "() => { const {plot} = document.querySelector('.chart'), {min, max} = plot.scales.y;"
        " return [min, Math.sqrt(min * max), max].map((y) => plot.valToPos(y, 'y')); }"
    )
    assert places[0] - places[1] == pytest.approx(places[1] - places[2])
    for axis in ("tokens", "seconds"):
        page.get_by_role("combobox", name="Over").select_option(axis)
        assert page.evaluate(LINES)["Loss: first training"]["xs"] == logged(runs, "first", "train", axis)
    page.get_by_role("combobox", name="Over").select_option("step")

    # Dragging shows a part in every chart, and so do keys.
    ranges = "() => [...document.querySelectorAll('.chart')].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
    whole, all_of_it = page.evaluate(ranges), page.get_by_role("button", name="Show all")
    point_at(page, "Loss", 2)
    page.mouse.down()
    point_at(page, "Loss", 4)
    page.mouse.up()
    assert {tuple(np.round(each)) for each in page.evaluate(ranges)} == {(2, 4)}
    all_of_it.click()
    assert page.evaluate(ranges) == whole and all_of_it.is_disabled()
    chart = page.get_by_role("slider", name="Loss: the crosshair")
    chart.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert chart.get_attribute("aria-valuetext").startswith("step 3: first training")
    page.keyboard.press("+")
    assert page.evaluate(ranges)[1] != whole[1] and all_of_it.is_enabled()
    page.keyboard.press("Escape")
    assert page.evaluate(ranges) == whole

    hide = page.get_by_role("button", name="first training")
    hide.first.click()
    assert hide.first.get_attribute("aria-pressed") == "false"
    page.get_by_text("The numbers as a table").click()
    row = page.locator("details tbody tr").nth(3)
    row.wait_for()
    cells = row.locator("td").all_inner_texts()
    assert cells[:2] == ["4", f"{losses[3]:.4f}"]


@pytest.mark.system
def test_a_run_that_trains_is_followed_without_a_reload(page: Any, configured_run: Path) -> None:
    run, server = RunDirectory(configured_run), Live(ServerConfig(ui=True), {"run": configured_run})
    (*_, last) = (row for row in read_json_lines(run.metrics_file)[0] if row["split"] == "train")
    tab = page.context.browser.new_page()
    try:
        with run.locked():
            tab.goto(f"{server.url}/ui#room=training&run=run&smooth=0")
            tab.locator("#status", has_text="Training now").wait_for()
            tab.wait_for_selector("text=step 6 ·")
            before = tab.evaluate(LINES)["Loss: run training"]
            tab.evaluate("window.isSame = true")
            with run.metrics_file.open("a") as file:
                file.write(json.dumps({**last, "step": 8, "loss": 0.125}) + "\n")
            with run.samples_file.open("a") as file:
                file.write(json.dumps({"step": 8, "prompt": "Sheep jump", "text": " high"}) + "\n")
            tab.wait_for_selector("text=step 8 · training loss 0.1250")
            after = tab.evaluate(LINES)["Loss: run training"]
            assert (after["xs"], after["ys"]) == ([*before["xs"], 8], [*before["ys"], 0.125])
            assert after["said"] == "0.1250" and tab.locator("pre").first.inner_text() == "Sheep jump high"
            assert tab.evaluate("window.isSame")
    finally:
        tab.close()
        server.close()


@pytest.mark.system
def test_one_step_is_chosen_for_texts_curves_and_the_network(page: Any, watching: Live, runs: dict[str, Path]) -> None:
    run = RunDirectory(runs["first"])
    samples = read_json_lines(run.samples_file)[0]
    judged = {"step": 1, "prompt": "2+2?", "text": " <b>4</b>", "reward": 0.75, "advantage": -0.5}
    with RunDirectory(runs["second run"]).samples_file.open("a") as file:
        file.write(json.dumps({**judged, "rewards": {"check.py": 0.75, "judge": None}}) + "\n")
    with RunDirectory(runs["second run"]).metrics_file.open("a") as file:
        measured = {"split": "analysis", "tokens": 9, "seconds": 9, "dead_heads": ["0.1"]}
        file.write("".join(json.dumps({**measured, "step": step}) + "\n" for step in (1, 2)))
    run.plan.write_text("<h1>Planned</h1>")
    page.emulate_media(reduced_motion="reduce")
    page.goto("about:blank")
    page.goto(f"{watching.url}/ui#room=training&run=first&beside=second+run")
    page.wait_for_selector("text=step 6 ·")
    assert page.locator("pre").first.inner_text().endswith(samples[-1]["text"].rstrip("\n"))
    page.get_by_text("reward 0.7500, advantage -0.5000, check.py 0.7500, judge –").wait_for()
    assert page.locator("pre", has_text="2+2?").inner_text() == "2+2? <b>4</b>"
    page.locator("td", has_text="training.max_steps").wait_for()
    page.get_by_role("link", name="Plan of first").wait_for()
    page.get_by_text("second run: These heads add nothing to the output of their layers: 0.1.").wait_for()

    point_at(page, "Loss", 4, click=True)
    page.wait_for_selector("text=step 4 · training loss")
    by_step = {row["step"]: row for row in samples}
    assert page.locator("pre").first.inner_text().endswith(by_step[4]["text"].rstrip("\n"))
    assert f"training loss {logged(runs, 'first', 'train', 'loss')[3]:.4f}" in page.locator(".player").inner_text()

    page.get_by_text("Training over one picture").scroll_into_view_if_needed()
    for step in (4, 0):
        stored = StoredTrace.open(run.traces / f"step-{step:08d}")
        page.wait_for_selector(f".stage[data-step='{step}'] .odd")
        top = stored.manifest["predictions"][-1]["top"]
        drawn = page.eval_on_selector_all(".odd .bar", "(bars) => bars.map((bar) => Number(bar.dataset.probability))")
        assert drawn == pytest.approx([probability for _, probability in top])
        weights = stored.read("blocks.0.attention.weights").mean(0)[-1]
        arcs = "(arcs) => arcs.map((arc) => [Number(arc.dataset.from), Number(arc.dataset.weight)])"
        looks = page.eval_on_selector_all(".arcs .looks", arcs)
        assert looks and all(weight == pytest.approx(float(weights[place]), rel=1e-3) for place, weight in looks)
        page.get_by_role("slider", name="Step", exact=True).fill("0")
    crosshair = (
        "() => { const {plot} = document.querySelector('.chart'); return plot.posToVal(plot.cursor.left, 'x'); }"
    )
    page.get_by_role("slider", name="Step", exact=True).fill("2")
    assert page.evaluate(crosshair) == pytest.approx(2, abs=0.05)
    # Between two pictures there are others, and the last one is exact.
    page.emulate_media(reduced_motion="no-preference")
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector(".stage[data-step='6'] .odd")
    page.get_by_role("button", name="Play").wait_for()
    last = StoredTrace.open(run.traces / "step-00000006").manifest["predictions"][-1]["top"][0][1]
    page.wait_for_function("(p) => document.querySelector('.odd .bar').dataset.probability === String(p)", arg=last)


@pytest.mark.system
def test_every_room_shows_what_there_is(page: Any, watching: Live, runs: dict[str, Path], votes: Path) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(f"{watching.url}/ui#room=training&run=first")
    page.wait_for_selector("text=step 6 ·")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400

    page.get_by_role("link", name="Data").click()
    page.wait_for_selector("article pre")
    _, origin = next(iter(show_step(runs["first"], 1)))
    assert page.locator("article pre").first.inner_text() == origin.text
    page.get_by_role("heading", name="The corpus").wait_for()
    assert page.locator("iframe").count() == 0
    report = json.loads((RunDirectory.open(runs["first"]).corpus / "report.json").read_text(encoding="utf-8"))
    kept = page.locator("td:text-is('train') ~ td").all_inner_texts()
    assert kept == [f"{value:,}" for value in report["tokens"]["train"].values()]

    page.get_by_role("link", name="Chat").click()
    model, beside = page.locator("#controls select").nth(0), page.locator("#controls select").nth(1)
    model.select_option("plain")
    beside.select_option("plain")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Seed").fill("3")
    page.fill("#say", "Sheep")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Right is better").click()
    page.wait_for_selector("text=Saved in")
    kept = json.loads(votes.read_text(encoding="utf-8").splitlines()[-1])
    asked = {
        "model": "plain",
        "prompt": "Sheep",
        "max_tokens": 12,
        "temperature": 0.8,
        "top_p": 0.95,
        "logprobs": 5,
    }
    answers = [httpx.post(f"{watching.url}/v1/completions", json={**asked, "seed": seed}).json() for seed in (3, 4)]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert [kept["rejected"], kept["chosen"]] == texts
    first = answers[0]["choices"][0]["logprobs"]
    shown = page.locator(".answer").first.locator(".tok").first
    shown.hover()
    tip = page.locator(".answer").first.locator(".tip")
    assert tip.locator("button").count() == len(first["top_logprobs"][0]) == 5
    share = 100 * np.exp(first["token_logprobs"][0])
    assert tip.locator("small").inner_text().endswith((f" {share:.1f} %", f" {share:.2f} %"))

    model.select_option("chat")
    beside.select_option("")
    page.get_by_role("button", name="Start over").click()
    page.fill("#say", "Hi")
    page.get_by_role("button", name="Send").click()
    page.locator(".answer .tok").nth(2).wait_for()

    page.get_by_role("link", name="Trace").click()
    page.get_by_role("tab", name="Writing").click()
    page.get_by_role("button", name="Write the likeliest").wait_for()
    before = page.locator(".token").count()
    page.get_by_role("button", name="Write the likeliest").click()
    page.wait_for_selector(f".token:nth-child({before + 1})")
    beside.select_option("plain")
    page.wait_for_selector("#view.beside")
    assert page.locator("#view h2", has_text="Token by token").count() == 2
    terms = page.locator("dfn")
    assert terms.count() and not terms.first.locator(".tip").is_visible()
    terms.first.focus()
    assert terms.first.locator(".tip").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.system
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_room_of_runs_breaks_a_rule_of_accessibility(page: Any, watching: Live, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    rooms = {
        "room=training&run=first&beside=second+run": ".stage .odd",
        "room=data&run=first": "article pre",
        "room=arena": ".choices, #say",
        "room=analysis&view=gains&model=plain&prompt=Sheep": "body[data-ready=gains]",
        "room=analysis&view=loop&model=plain&prompt=Sheep": "body[data-ready=loop]",
    }
    broken = {}
    for address, sign in rooms.items():
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto("about:blank")
            page.goto(f"{watching.url}/ui#{address}")
            page.wait_for_selector("#rooms a")
            if address.startswith("room=training"):
                page.get_by_text("Training over one picture").scroll_into_view_if_needed()
            page.wait_for_selector(sign)
            broken[address, width] = violations(page)
    assert [(place, found) for place, found in broken.items() if found] == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("address", "there"),
    [
        ("room=training&beside=second+run", ".uplot"),
        ("room=data", "details"),
        ("room=arena", "#say"),
        ("room=analysis&view=gains&prompt=Sheep", "body[data-ready=gains]"),
        ("room=analysis&view=influence&prompt=Sheep", "body[data-ready=influence]"),
        ("room=analysis&view=blocks&prompt=Sheep", "body[data-ready=blocks]"),
        ("room=analysis&view=loop&prompt=Sheep", "body[data-ready=loop]"),
        ("room=analysis&view=compare&prompt=Sheep", "body[data-ready=compare]"),
    ],
)
def test_keys_alone_reach_everything_in_every_room(page: Any, watching: Live, address: str, there: str) -> None:
    page.goto("about:blank")
    page.goto(f"{watching.url}/ui#{address}")
    page.wait_for_selector(there)
    if "arena" in address:
        page.locator("#say").fill("Sheep")
        page.keyboard.press("Control+Enter")
        page.locator(".choices button").nth(3).wait_for()
    page.wait_for_load_state("networkidle")
    page.locator("h1").click()  # Tab goes on from here
    assert left_by_keys(page) == []


@pytest.mark.system
def test_the_stability_of_a_run_without_measurements_says_what_to_do(page: Any, watching: Live) -> None:
    other = page.context.browser.new_page()  # whose console has the status of the refused request
    other.goto(f"{watching.url}/ui#room=analysis&view=training&run=first")
    told = other.locator(".picture-side [role=alert]")
    told.wait_for()
    assert "measured nothing while it trained" in told.inner_text()
    assert "analysis.quantities=[sharpness,noise,layers]" in told.inner_text()
    other.close()
