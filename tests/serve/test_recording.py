"""The log of a server: what it records of answers and votes, and what it never does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sheepop.core.errors import ConfigError, OutputError, StorageError
from sheepop.serve.config import ServerConfig
from sheepop.serve.conversation_log import ConversationLog, LogFaults, read_log

from .conftest import Live, wait_for

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi, I am jane.doe@sheep-farm.org"}], "max_tokens": 6}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Starts a server with a log, whose settings are given, and returns a client of it."""
    servers: list[Live] = []
    clients: list[httpx.Client] = []

    def start(**settings: Any) -> httpx.Client:
        servers.append(Live(ServerConfig(log=str(tmp_path / "log"), **settings)))
        clients.append(httpx.Client(base_url=servers[-1].url, timeout=60))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for server in servers:
        server.close()


def records(directory: Path, count: int) -> list[dict[str, Any]]:
    """The records of the log, once there are `count`."""

    def found() -> list[dict[str, Any]]:
        faults = LogFaults()
        read = [logged.record for logged in read_log(directory / "log", faults)]
        assert faults == LogFaults()
        return read

    wait_for(lambda: len(found()) >= count)
    return found()


def test_answers_of_every_api_are_recorded_as_clients_get_them(
    serving: Callable[..., httpx.Client], tmp_path: Path
) -> None:
    client = serving()
    whole = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).raise_for_status()
    assert whole.headers["x-sheepop-recorded"] == "yes"
    streamed = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0, "stream": True}).raise_for_status()
    assert streamed.headers["x-sheepop-recorded"] == "yes"
    asked = {"model": "plain", "prompt": ["Once", "Twice"], "n": 2, "max_tokens": 5, "seed": 3, "logprobs": 1}
    texts = client.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
    message = {"model": "chat", "max_tokens": 6, "messages": [{"role": "user", "content": "Hi"}]}
    client.post("/v1/messages", json=message).raise_for_status()
    client.post(
        "/api/chat", json={"model": "chat", "messages": message["messages"], "stream": False}
    ).raise_for_status()
    found = records(tmp_path, 6)
    said = whole.json()["choices"][0]
    for record in found[:2]:
        assert record["answers"][0]["message"] == said["message"]
        assert record["answers"][0]["finish_reason"] == "length" and record["answers"][0]["tokens"] == 6
        assert (record["ended"], record["model"], record["settings"]["temperature"]) == ("whole", "chat", 0)
        assert 0 < record["first_token_seconds"] <= record["seconds"] < 60
        assert record["messages"][0]["content"].startswith("Hi, I am <EMAIL_")
    for record, prompt, pair in zip(found[2:4], ("Once", "Twice"), (texts[:2], texts[2:]), strict=True):
        assert record["prompt"] == prompt
        for answer, choice in zip(record["answers"], pair, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            assert answer["text"] == choice["text"]
            assert answer["mean_logprob"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-3)
    assert [record["path"] for record in found[4:]] == ["/v1/messages", "/api/chat"]


def test_who_does_not_want_it_is_not_recorded(serving: Callable[..., httpx.Client], tmp_path: Path) -> None:
    client = serving()
    kept_out = client.post("/v1/chat/completions", json={**CHAT, "store": False}).raise_for_status()
    assert "x-sheepop-recorded" not in kept_out.headers
    client.post("/v1/responses", json={"model": "chat", "input": "Hi", "store": False, "max_output_tokens": 4})
    client.post("/v1/completions", json={"model": "plain", "prompt": "Once", "max_tokens": 3}).raise_for_status()
    (record,) = records(tmp_path, 1)
    assert record["prompt"] == "Once"


def test_a_vote_joins_the_answer_that_its_client_got(serving: Callable[..., httpx.Client], tmp_path: Path) -> None:
    keys = [{"key": f"key of {name}", "name": name} for name in ("ann", "bob")]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    client = serving(api_keys=str(tmp_path / "keys.json"))
    ann, bob = ({"Authorization": f"Bearer key of {name}"} for name in ("ann", "bob"))
    answer = client.post("/v1/chat/completions", json=CHAT, headers=ann).raise_for_status().json()
    vote = {"id": answer["id"], "vote": -1, "comment": "Call me: jane.doe@sheep-farm.org"}
    assert client.post("/v1/votes", json=vote).status_code == 401
    assert client.post("/v1/votes", json=vote, headers=bob).json()["error"]["code"] == "answer_not_found"
    assert client.post("/v1/votes", json={**vote, "choice": 1}, headers=ann).status_code == 400
    assert client.post("/v1/votes", json={**vote, "vote": 2}, headers=ann).status_code == 400
    assert client.post("/v1/votes", json=vote, headers=ann).json() == {"id": answer["id"], "recorded": True}
    answered, voted = records(tmp_path, 2)
    assert (voted["kind"], voted["id"], voted["vote"], voted["choice"]) == ("vote", answered["id"], -1, 0)
    assert voted["comment"].startswith("Call me: <EMAIL_")


def test_a_client_that_leaves_is_recorded_as_far_as_it_got(
    serving: Callable[..., httpx.Client], tmp_path: Path
) -> None:
    client = serving()
    asked = {"model": "plain", "prompt": "Once", "max_tokens": 200, "min_tokens": 200, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    (record,) = records(tmp_path, 1)
    assert record["ended"] == "left" and record["answers"][0]["finish_reason"] is None
    assert 1 <= record["answers"][0]["tokens"] < 200


def test_a_full_disk_keeps_nobody_from_an_answer(
    serving: Callable[..., httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    client = serving()

    def full(*_: Any) -> None:
        raise StorageError("No space is left.")

    asked = {"model": "plain", "prompt": "Once", "max_tokens": 3}
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "sheepop.server"):
        patch.setattr(ConversationLog, "_write", full)
        for _ in range(3):
            client.post("/v1/completions", json=asked).raise_for_status()
        wait_for(lambda: "sheepop_unrecorded_total 3.0" in client.get("/metrics").text)
    assert caplog.text.count("Conversations are not recorded for now") == 1
    client.post("/v1/completions", json={**asked, "prompt": "Twice"}).raise_for_status()
    (record,) = records(tmp_path, 1)
    assert record["prompt"] == "Twice"


def test_without_a_log_nothing_is_recorded_or_voted_on() -> None:
    server = Live(ServerConfig())
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "plain", "prompt": "a", "max_tokens": 2})
        assert "x-sheepop-recorded" not in answer.headers
        vote = httpx.post(f"{server.url}/v1/votes", json={"id": answer.json()["id"], "vote": 1})
        assert vote.status_code == 404
    finally:
        server.close()


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        ConversationLog(tmp_path / "file", max_bytes=2**30, max_days=1)
    with pytest.raises((ConfigError, ValueError), match="log records the models of this process"):
        ServerConfig(log="log", engine="ray")
