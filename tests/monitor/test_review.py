"""The review of a log: decisions reach the disk and the data, and no text of a stranger is more than text."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sheepop.jobs.monitor import write_rows
from sheepop.monitor.answered import read_answers
from sheepop.monitor.decisions import FILE, Decision, read_decisions, reviewed
from sheepop.posttrain.rows import Preference, Supervised, read_rows
from sheepop.serve.config import ServerConfig
from sheepop.serve.conversation_log import LogFaults
from sheepop.serve.server import Server

from ..command_line import in_process
from .conftest import Say

httpx = pytest.importorskip("httpx")
from sheepop.monitor.review import Review, to_review  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\"></pre></textarea>"
    "<svg onload=alert(1)> \u202egnp.exe \x1b[2J \ud83d https://example.org/?q= ${1+1} {{1+1}}\n"
)


class Reviewing:
    """The page's server in a thread of this process."""

    def __init__(self, directory: Path) -> None:
        answers = list(read_answers(directory, LogFaults()))
        self.review = Review(answers, read_decisions(directory)[0], directory)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = Server(self.review.app(), self.review, ServerConfig())
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def reviewing(say: Say, tmp_path: Path) -> Iterator[Reviewing]:
    """A review of five answers: a liked one, a hostile one that was voted down, one that declines, and two others."""
    say("Name a river.", "The Aare.", votes=(1,))
    say(HOSTILE, HOSTILE, votes=(-1,), comment=HOSTILE)
    say("Name a lake.", "I'm sorry, but I cannot help with that.")
    say("Name a hill.", "Sand.", mean_logprob=-4.0)
    say("Name a town.", "Bern.", mean_logprob=-0.5)
    server = Reviewing(tmp_path / "log")
    yield server
    server.close()


def test_there_is_most_to_learn_from_the_first(say: Say, tmp_path: Path) -> None:
    say("Name a river.", "The Aare.", votes=(1,))
    say("Name a lake.", "Sand.", mean_logprob=-0.1)
    say("Name a hill.", "Stone", reason="length")
    say("Name a town.", "Bread.", mean_logprob=-3.0)
    say("Name a peak.", "Sand.", votes=(-1,))
    found = to_review(list(read_answers(tmp_path / "log", LogFaults())))
    assert [(why, each.asked.split()[-1]) for why, each in found] == [
        ("bad vote", "peak."), ("cut at the length limit", "hill."), ("", "town."), ("", "lake."),
        ("good vote", "river."),
    ]  # fmt: skip


def test_only_who_has_the_token_sees_answers_and_decides(reviewing: Reviewing, tmp_path: Path) -> None:
    with httpx.Client(base_url=reviewing.url) as client:
        assert client.get("/").headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        decision = {"id": f"{0:024x}", "choice": 0, "decision": "drop"}
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert client.get("/answers", headers=headers).status_code == 401
            assert client.get("/answers/0", headers=headers).status_code == 401
            assert client.post("/decisions", json=decision, headers=headers).status_code == 401
        owner = {"Authorization": f"Bearer {reviewing.review.token}"}
        assert client.get("/answers", headers={**owner, "Host": "evil.example"}).status_code == 403
        assert client.post("/decisions", json=decision, headers={**owner, "Origin": "http://evil"}).status_code == 403
        assert not (tmp_path / "log" / FILE).exists()
        mends = {"decision": "mend"}
        for wrong in ({"decision": "sell"}, mends, {**mends, "text": " "}, {"text": "kept"}, {"choice": -1}):
            assert client.post("/decisions", json={**decision, **wrong}, headers=owner).status_code == 400
        assert client.post("/decisions", json={**decision, "id": "other"}, headers=owner).status_code == 404
        assert (
            client.get("/answers/5", headers=owner).json()["error"]["message"] == "There is no answer 5; there are 5."
        )
        assert client.get("/answers", headers=owner).json()["decisions"] == [None] * 5
        shown = client.get("/answers/0", headers=owner).json()
        text = HOSTILE.replace("\ud83d", "\ufffd")
        assert [shown["asked"][0]["text"], shown["answer"]["text"], *shown["comments"]] == [text] * 3
        assert client.post("/decisions", json=decision, headers=owner).json() == {"decision": "drop"}
        assert client.get("/answers", headers=owner).json()["decisions"] == [None] * 4 + ["drop"]
    # The next session finds it, and the last decision on an answer counts.
    found, num_bad = read_decisions(tmp_path / "log")
    assert ({name: each.decision for name, each in found.items()}, num_bad) == ({(f"{0:024x}", 0): "drop"}, 0)


def test_decisions_become_data(say: Say, tmp_path: Path) -> None:
    say("Name a river.", "The Aare.", votes=(1,))
    say("Name a lake.", "Sand.", votes=(-1,))
    say("Name a hill.", "Bantiger.")
    say("Name a town.", "Stone.", chat=False)
    decisions = [
        {"id": f"{0:024x}", "choice": 0, "decision": "drop"},
        {"id": f"{1:024x}", "choice": 0, "decision": "mend", "text": "Brienz."},
        {"id": f"{2:024x}", "choice": 0, "decision": "drop"},
        {"id": f"{2:024x}", "choice": 0, "decision": "keep"},
        {"id": f"{3:024x}", "choice": 0, "decision": "mend", "text": " Bern."},
        {"id": "removed with an old file", "choice": 0, "decision": "keep"},
    ]
    file = tmp_path / "log" / FILE
    file.write_text("".join(json.dumps(row) + "\n" for row in decisions) + '{"id": "torn')
    written = write_rows(tmp_path / "log", "sft", tmp_path / "sft.jsonl")
    assert written.left_out == {f"a line of {FILE} is no decision": 1, "dropped in review": 1}
    learnt = [row.answer if isinstance(row.answer, str) else row.answer[-1]["content"] for row in
              read_rows([tmp_path / "sft.jsonl"], Supervised)]  # fmt: skip
    assert learnt == ["Brienz.", "Bantiger.", " Bern."]
    assert write_rows(tmp_path / "log", "preferences", tmp_path / "votes.jsonl").written == 2
    pair, plain = read_rows([tmp_path / "votes.jsonl"], Preference)
    assert [side[0]["content"] for side in (pair.chosen, pair.rejected)] == ["Brienz.", "Sand."]  # type: ignore[index]
    assert (plain.chosen, plain.rejected) == (" Bern.", "Stone.")
    left_out = Counter[str]()
    answers = list(read_answers(tmp_path / "log", LogFaults()))
    drop = {answers[0].name: Decision(id=answers[0].id, choice=0, decision="drop")}
    assert list(reviewed(answers, drop, left_out)) == answers[1:] and left_out.total() == 1
    assert in_process("monitor", tmp_path / "log", "--review", "--json").code == 2


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
def test_a_person_reviews_with_the_keyboard(reviewing: Reviewing, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(reviewing.url) else wrong.append(asked.url))
        page.goto(f"{reviewing.url}/#token={reviewing.review.token}")

        def at(number: int) -> Any:
            page.locator("#about", has_text=f"{number} of 5 ·").wait_for()
            return page.locator("article > pre").all_inner_texts()

        hostile = HOSTILE.replace("\ud83d", "\ufffd").replace("\u202e", "⟨202e⟩").replace("\x1b", "⟨001b⟩").strip()
        assert [text.strip() for text in at(1)] == [hostile] * 3
        assert page.title() == "Review of answers" and page.locator("main img, main svg, main script").count() == 0
        page.keyboard.press("d")
        assert at(2) == ["Name a lake.", "I'm sorry, but I cannot help with that."]
        page.keyboard.press("m")
        page.fill("#mended", "Lake Brienz <b>")
        page.keyboard.press("k")  # is typed, and decides nothing
        page.keyboard.press("Control+Enter")
        assert at(3) == ["Name a hill.", "Sand."]
        page.keyboard.press("m")
        page.keyboard.press("Escape")
        page.keyboard.press("k")
        at(4)
        page.keyboard.press("ArrowLeft")
        assert at(3) == ["Name a hill.", "Sand."]
        page.keyboard.press("d")
        at(4)
        page.get_by_role("button", name="Back").click()
        at(3)
        page.get_by_role("button", name="Back").click()
        assert at(2) == ["Name a lake.", "I'm sorry, but I cannot help with that.", "Lake Brienz <b>k"]
        assert page.inner_text("#progress") == "3 of 5 decided: 0 kept, 1 mended, 2 dropped"
        page.keyboard.press("n")
        at(4)
        page.reload()
        at(4)
        # Who has no token is told so.
        page.goto("about:blank")
        page.goto(f"{reviewing.url}/")
        page.locator("#trouble", has_text="The token is missing or wrong").wait_for()
        assert all("401" in each for each in wrong)
        browser.close()
    rows = [json.loads(line) for line in (tmp_path / "log" / FILE).read_text().splitlines()]
    assert [(row["decision"], row.get("text")) for row in rows] == [
        ("drop", None), ("mend", "Lake Brienz <b>k"), ("keep", None), ("drop", None)
    ]  # fmt: skip
