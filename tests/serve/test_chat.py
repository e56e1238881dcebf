"""``sheepop chat URL`` against a live server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest

from sheepop.core.errors import DataError
from sheepop.generate.config import requested
from sheepop.jobs.chat import Conversation, Reasoning, ServerSpeaker
from sheepop.serve.config import ServerConfig

from .conftest import TEMPLATE, Live


def test_a_server_answers_as_its_api_does(live: Any) -> None:
    speaker = ServerSpeaker(live.url, model="chat")
    conversation = Conversation(speaker, requested(max_new_tokens=9, seed=2), system="Be kind.")
    answer = "".join(conversation.say("Hello"))
    asked = {
        "model": "chat",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 9,
        "seed": 2,
    }
    request = urllib.request.Request(
        f"{live.url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choice = json.loads(response.read())["choices"][0]
    assert (answer, choice["finish_reason"]) == (choice["message"]["content"], "length")
    assert conversation.messages[-1] == {"role": "assistant", "content": answer}
    assert "--max-new-tokens" in speaker.note


def test_the_template_of_a_server_sees_the_variables(live: Any) -> None:
    said = [{"role": "user", "content": "Hello"}]
    settings = requested(max_new_tokens=9, temperature=0.0)
    speaker = ServerSpeaker(live.url, model="chat", chat_template_kwargs={"mood": "so "})
    asked = {"model": "chat", "prompt": "[user] Hello\n[assistant] so ", "max_tokens": 9, "temperature": 0}
    request = urllib.request.Request(
        f"{live.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert "".join(speaker.answer(said, settings)) == json.loads(response.read())["choices"][0]["text"]


def test_a_server_that_refuses_is_heard(live: Any) -> None:
    assert ServerSpeaker(f"{live.url}/v1/").name == "chat"  # its first model
    with pytest.raises(DataError, match=r"answered 404: .*nobody"):
        list(ServerSpeaker(live.url, model="nobody").answer([{"role": "user", "content": "x"}], requested()))
    with pytest.raises(DataError, match="answered 404"):
        ServerSpeaker(f"{live.url}/elsewhere")


def test_reasoning_is_counted_and_shown_apart(tmp_path: Path) -> None:
    (tmp_path / "thinks.jinja").write_text(TEMPLATE + "<think>{# up to </think> #}")
    said: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    asked = {"model": "chat", "messages": said, "guided_regex": "Hm\\.</think>Yes\\."}
    live = Live(ServerConfig(max_running=4, max_waiting=8, chat_template=str(tmp_path / "thinks.jinja")))
    try:
        with httpx.Client(base_url=live.url, timeout=60) as client:
            whole = client.post("/v1/chat/completions", json=asked).json()
            with_usage = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            events = client.post("/v1/chat/completions", json=with_usage).text.split("\n\n")[:-2]
        speaker = ServerSpeaker(live.url, model="chat")
        speaker._endpoint._settings = {"guided_regex": asked["guided_regex"]}
        pieces = list(speaker.answer(said, requested(max_new_tokens=40)))
        conversation = Conversation(speaker, requested(max_new_tokens=40))
        list(conversation.say("Hello"))
    finally:
        live.close()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    # The network writes single characters.
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm.</think>")}
    assert whole["usage"]["completion_tokens"] >= len("Hm.</think>Yes.")
    assert json.loads(events[-1][6:])["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm.</think>")}
    assert "".join(piece for piece in pieces if isinstance(piece, Reasoning)) == "Hm."
    assert "".join(piece for piece in pieces if not isinstance(piece, Reasoning)) == "Yes."
    assert conversation.messages[-1]["content"] == "Yes."
