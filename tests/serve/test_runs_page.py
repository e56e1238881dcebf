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

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import CheckpointError
from sheepop.core.json_lines import read_json_lines
from sheepop.data.corpus import Corpus
from sheepop.interpret.store import StoredTrace
from sheepop.jobs.config import load_config
from sheepop.jobs.data import show_step
from sheepop.jobs.serve import WatchedRuns
from sheepop.posttrain.rows import Preference, read_rows
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.tokenizer import CharTokenizer

from ..running import train
from .conftest import Live, Shelf, tiny
from .test_inside import BROWSER, floats

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
        places = ("device=cpu", f"data.paths={text_folder}", f"output_dir={place / name}")
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
    assert (summary["state"], summary["steps"], summary["pages"]) == ("finished", 6, ["run", "corpus"])
    run = RunDirectory.open(runs["first"])
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
    for kind, title in (("run", "Training"), ("corpus", "Corpus")):
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


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
def test_every_room_shows_what_there_is(watching: Live, runs: dict[str, Path], votes: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    rows = read_json_lines(RunDirectory(runs["first"]).metrics_file)[0]
    samples = read_json_lines(RunDirectory(runs["first"]).samples_file)[0]
    judged = {"step": 1, "prompt": "2+2?", "text": " <b>4</b>", "reward": 0.75, "advantage": -0.5}
    with RunDirectory(runs["second run"]).samples_file.open("a") as file:
        file.write(json.dumps({**judged, "rewards": {"check.py": 0.75, "judge": None}}) + "\n")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(watching.url) else wrong.append(asked.url))

        page.goto(f"{watching.url}/ui#room=training&run=first&beside=second+run")
        page.wait_for_selector("figure.chart svg")
        norm = [row["grad_norm"] for row in rows if row["split"] == "train"][-1]
        page.wait_for_function(
            "text => [...document.querySelectorAll('.chart .shape')].some((each) => each.textContent.includes(text))",
            arg=f"first {norm:.4f}",
        )
        page.wait_for_selector("pre b")
        assert page.locator("pre").first.inner_text().endswith(samples[-1]["text"].rstrip("\n"))
        page.get_by_label("Step", exact=True).first.fill("0")
        assert page.locator("pre").first.inner_text().endswith(samples[0]["text"].rstrip("\n"))
        page.get_by_role("heading", name="Answers and their rewards").wait_for()
        assert page.get_by_text("reward 0.7500, advantage -0.5000, check.py 0.7500, judge –").count() == 1
        assert page.locator("pre", has_text="2+2?").inner_text() == "2+2? <b>4</b>"
        page.get_by_role("button", name="Play").click()
        page.wait_for_selector("text=step 2")
        assert page.locator("td", has_text="training.max_steps").count() == 1

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
        browser.close()
    assert wrong == []
