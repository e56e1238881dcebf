"""The arena: the models' names are shown after the vote, and each vote is saved once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.errors import DataError, UsageError
from sheepop.evaluate.ranking import rank, read_votes
from sheepop.jobs.config import load_config
from sheepop.jobs.serve import serve_arena
from sheepop.posttrain.rows import Preference, Prompt, read_rows
from sheepop.serve.arena import Arena, BeginRequest, Lots, Round, VoteRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError
from sheepop.serve.registry import Registry
from sheepop.serve.votes import VotesFile

from .conftest import Live, Shelf, WithTemplate, model_of, tiny
from .test_inside import BROWSER

httpx = pytest.importorskip("httpx")
NAMES = ("merino", "suffolk", "karakul")
# So long that little of the context is left, and the answers end soon.
FILLED = " Please." * 27
PROMPTS = (f"What is wool?{FILLED}", f"Tell me of a lamb.{FILLED}")


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Models that write nothing but their initials, in upper and lower case."""
    votes = tmp_path_factory.mktemp("arena") / "votes.jsonl"
    server = Live(ServerConfig(ui=True, votes=str(votes)), models=NAMES, prompts=PROMPTS)
    for name in NAMES:
        weight = model_of(server.registry, name).generator.model.lm_head.weight
        with torch.no_grad():
            row = 1e6 * weight[0]
            weight.zero_()
            weight[ord(name[0])], weight[ord(name[0].upper())] = row, -row
    yield server
    server.close()


@pytest.fixture
def votes(arena: Live) -> Path:
    """An empty votes file."""
    with httpx.Client() as client:
        path = Path(client.get(f"{arena.url}/ui/arena").json()["votes"])
    path.unlink(missing_ok=True)
    return path


@pytest.fixture
def client(arena: Live) -> Iterator[Any]:
    with httpx.Client(base_url=f"{arena.url}/ui/arena", timeout=30) as found:
        yield found


def read(client: Any, name: str, side: str) -> str:
    """The whole answer of a side; checks that no event names a model."""
    lines = client.post(f"/rounds/{name}/{side}", json={}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(line.removeprefix("data: "))["text"] for line in lines[:-2])


def rows_of(votes: Path) -> list[Any]:
    return [json.loads(line) for line in votes.read_text(encoding="utf-8").splitlines()]


def test_a_round_hides_its_models_until_the_vote(client: Any, votes: Path) -> None:
    begun = client.post("/rounds", json={"prompt": PROMPTS[1]})
    name = begun.json()["round"]
    texts = [read(client, name, side) for side in ("left", "right")]
    again = client.get(f"/rounds/{name}")
    assert begun.json() == again.json() == {"round": name, "prompt": PROMPTS[1], "vote": None}
    assert [read(client, name, side) for side in ("left", "right")] == texts
    told = client.post(f"/rounds/{name}/vote", json={"vote": "right"}).json()
    assert told == client.get(f"/rounds/{name}").json()
    left, right = told["models"]
    # The model named on a side wrote its answer.
    assert [set(text.lower()) for text in texts] == [{left[0]}, {right[0]}]
    (row,) = rows_of(votes)
    assert row == {
        "prompt": PROMPTS[1], "chosen": texts[1], "rejected": texts[0], "chosen_model": right, "rejected_model": left,
        "vote": "right", "models": [left, right], "round": name,
    }  # fmt: skip


def test_a_vote_counts_once_however_often_it_is_sent(client: Any, arena: Live, votes: Path) -> None:
    name = client.post("/rounds", json={}).json()["round"]
    for side in ("left", "right"):
        read(client, name, side)
    codes: list[int] = []

    def vote(choice: str) -> None:
        codes.append(httpx.post(f"{arena.url}/ui/arena/rounds/{name}/vote", json={"vote": choice}).status_code)

    threads = [threading.Thread(target=vote, args=(choice,)) for choice in ("left", "right", "tie", "left")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 409, 409, 409] and len(rows_of(votes)) == 1
    refused = client.post(f"/rounds/{name}/vote", json={"vote": "left"}).json()["error"]
    assert "already saved" in refused["message"]
    assert client.post("/rounds/other/vote", json={"vote": "left"}).status_code == 404
    assert client.post(f"/rounds/{name}/vote", json={"vote": "up"}).status_code == 400
    assert client.post(f"/rounds/{name}/middle", json={}).status_code == 400
    assert client.post("/rounds", json={"prompt": " "}).status_code == 400
    assert client.get("/standings", headers={"Origin": "http://evil.example"}).status_code == 403
    assert len(rows_of(votes)) == 1


def test_two_voters_do_not_disturb_each_other(client: Any, votes: Path) -> None:
    one, other = (client.post("/rounds", json={"prompt": prompt}).json()["round"] for prompt in PROMPTS)
    texts = {name: [read(client, name, side) for side in ("right", "left")] for name in (other, one)}
    client.post(f"/rounds/{other}/vote", json={"vote": "left"})
    assert client.get(f"/rounds/{one}").json()["vote"] is None
    client.post(f"/rounds/{one}/vote", json={"vote": "right"})
    kept = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows_of(votes)]
    assert kept == [(PROMPTS[1], *reversed(texts[other])), (PROMPTS[0], *texts[one])]


def test_tuning_learns_from_preferences_and_passes_over_ties(client: Any, votes: Path) -> None:
    def play(vote: str) -> None:
        name = client.post("/rounds", json={}).json()["round"]
        for side in ("left", "right"):
            read(client, name, side)
        client.post(f"/rounds/{name}/vote", json={"vote": vote}).raise_for_status()

    for vote in ("tie", "neither"):
        play(vote)
    with pytest.raises(DataError, match="None of 2 votes prefers one answer"):
        list(read_rows([votes], Preference))
    play("left")
    (learnt,) = read_rows([votes], Preference)
    row = rows_of(votes)[-1]
    assert (learnt.prompt, learnt.chosen, learnt.rejected) == (row["prompt"], row["chosen"], row["rejected"])
    assert [found.prompt for found in read_rows([votes], Prompt)] == [found["prompt"] for found in rows_of(votes)]
    assert {found["prompt"] for found in rows_of(votes)} <= set(PROMPTS)
    assert [sorted(found["answers"][0].lower())[0] for found in rows_of(votes)[:2]] == [
        found["models"][0][0] for found in rows_of(votes)[:2]
    ]


@pytest.mark.parametrize(("left", "right"), [("same", "same"), ("", "some"), ("some", " \n")])
def test_a_vote_on_answers_that_teach_nothing_still_counts(tmp_path: Path, left: str, right: str) -> None:
    played = Round("Hi?", ("a", "b"), is_chat=False)
    played.sides["left"].text, played.sides["right"].text = left, right
    file = VotesFile(tmp_path / "votes.jsonl")
    file.append(played.row("left"))
    assert rank(read_votes(file.path))[0].name == "a"
    with pytest.raises(DataError, match="prefers one answer"):
        list(read_rows([file.path], Preference))


def test_models_that_chat_are_asked_as_in_a_chat_and_nothing_is_voted_before_it_is_whole(tmp_path: Path) -> None:
    config = ServerConfig()
    names = ["a", "b"]
    registry = Registry(Shelf(lambda name: tiny(name, WithTemplate(), config), names, config, chats=names))
    file = VotesFile(tmp_path / "votes.jsonl")
    arena = Arena(registry, file, (), 60.0)

    async def play() -> None:
        name = json.loads((await arena.begin(BeginRequest(prompt=PROMPTS[0][:200]))).body)["round"]
        with pytest.raises(ApiError, match="when both answers are complete"):
            await arena.vote(name, VoteRequest(vote="left"))
        for side in ("left", "right"):
            answer = await arena.answer(name, side)  # type: ignore[arg-type]
            _ = [piece async for piece in answer.body_iterator]  # type: ignore[attr-defined]
        await arena.vote(name, VoteRequest(vote="left"))
        too_long = json.loads((await arena.begin(BeginRequest(prompt="long " * 100))).body)["round"]
        broken = await arena.answer(too_long, "left")
        said = "".join([piece async for piece in broken.body_iterator])  # type: ignore[attr-defined]
        assert "did not answer: " in said and "max_seq_len" in said
        with pytest.raises(ApiError, match="when both answers are complete"):
            await arena.vote(too_long, VoteRequest(vote="left"))

    asyncio.run(play())
    registry.close()
    arena.close()
    (row,) = read_rows([file.path], Preference)
    assert list(row.prompt) == [{"role": "user", "content": PROMPTS[0][:200]}] and row.chosen[0]["role"] == "assistant"  # type: ignore[index]


def test_a_vote_that_is_not_kept_tells_no_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    server = Live(ServerConfig(ui=True, votes=str(tmp_path / "folder")), models=NAMES)
    with httpx.Client(base_url=f"{server.url}/ui/arena", timeout=30) as client:
        name = client.post("/rounds", json={"prompt": PROMPTS[0]}).json()["round"]
        for side in ("left", "right"):
            read(client, name, side)
        refused = client.post(f"/rounds/{name}/vote", json={"vote": "left"})
        after = client.get(f"/rounds/{name}").json()
        missing = client.post("/rounds", json={})
    server.close()
    assert refused.status_code == 500 and "folder" in refused.json()["error"]["message"]
    assert after == {"round": name, "prompt": PROMPTS[0], "vote": None}
    assert missing.status_code == 400 and "no prompts to draw from" in missing.text


def test_a_line_without_its_end_does_not_swallow_the_next_vote(tmp_path: Path) -> None:
    file = VotesFile(tmp_path / "votes.jsonl")
    file.append({"a": 1})
    file.path.write_bytes(file.path.read_bytes().rstrip(b"\n"))
    file.append({"b": 2})
    assert file.path.read_bytes() == b'{"a":1}\n{"b":2}\n'


def test_pairs_and_orders_come_equally_often_and_cannot_be_foretold() -> None:
    lots, pairs = Lots(), list(permutations(NAMES, 2))
    drawn = Counter(lots.draw(pairs) for _ in range(1200))
    assert len(drawn) == 6 and max(drawn.values()) - min(drawn.values()) <= 20
    # The order that was drawn once less is twice as likely: two in three, within five standard deviations.
    turned = 0
    for _ in range(3000):
        fresh = Lots()
        turned += fresh.draw("ab") != fresh.draw("ab")
    assert abs(turned - 2000) < 130


def test_an_arena_needs_two_models_and_prompts_that_are_texts(tmp_path: Path) -> None:
    console, config = Console(quiet=True), load_config()
    with pytest.raises(UsageError, match="needs two models; given: a"):
        serve_arena({"a": tmp_path}, config, prompts=None, dtype=None, console=console)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "Hi?"}]}) + "\n")
    with pytest.raises(DataError, match=r"prompts.jsonl, line 1: prompt: an arena takes texts"):
        serve_arena({"a": tmp_path, "b": tmp_path}, config, prompts=file, dtype=None, console=console)


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_round_by_clicks_and_keys(arena: Live, votes: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(arena.url) else wrong.append(asked.url))
        button = lambda name: page.get_by_role("button", name=name)  # noqa: E731
        titles = page.locator(".answer h3")

        page.goto(f"{arena.url}/ui#room=arena")
        page.fill("#say", f"Who are you?{FILLED}")
        button("Ask both").click()
        button("Left is better").wait_for()
        assert not any(name in page.content() for name in NAMES)
        texts = page.locator(".written").all_inner_texts()
        page.reload()
        button("Left is better").wait_for()
        assert page.locator(".written").all_inner_texts() == texts and not any(name in page.content() for name in NAMES)
        button("Left is better").click()
        button("Next round").wait_for()
        (first,) = rows_of(votes)
        assert titles.all_inner_texts() == [f"Left: {first['models'][0]}", f"Right: {first['models'][1]}"]
        assert (first["prompt"], first["vote"]) == (f"Who are you?{FILLED}", "left") and texts[0].startswith(
            first["chosen"]
        )
        page.reload()
        page.get_by_role("heading", name="Standings").wait_for()
        assert first["models"][0] in titles.first.inner_text()

        for key in ("r", "t", "b"):
            page.keyboard.press("n")
            page.get_by_text("Which answer is better?").wait_for()
            page.keyboard.press(key)
            page.get_by_role("heading", name="Standings").wait_for()
        assert [row["vote"] for row in rows_of(votes)] == ["left", "right", "tie", "neither"]

        # Counted by hand: a win is 1, a tie a half.
        games, won = Counter[str](), Counter[str]()
        for row in rows_of(votes):
            scores = {"left": (1, 0), "right": (0, 1)}.get(row["vote"], (0.5, 0.5))
            for name, score in zip(row["models"], scores, strict=True):
                games[name] += 1
                won[name] += score
        table = [row.split("\t") for row in page.locator("tbody tr").all_inner_texts()]
        shares = {name: 100 * won[name] / games[name] for name in games}
        assert {name: (count, share) for name, count, share, *_ in table} == {
            name: (str(games[name]), f"{shares[name]:.{1 if shares[name] >= 10 else 2}f} %" if name in games else "–")
            for name in NAMES
        }
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert wrong == []
