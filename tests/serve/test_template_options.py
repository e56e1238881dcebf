"""What a request gives to the chat template: variables, documents, and where the prompt ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sheepop.core.errors import TokenizerError, UsageError
from sheepop.serve.config import ServerConfig

from .conftest import Live, WithTemplate, tiny

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes and"}]


@pytest.fixture(scope="module")
def moody() -> Iterator[Live]:
    server = Live(ServerConfig(chat_template_kwargs={"mood": "so "}), models=("chat",))
    yield server
    server.close()


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({}, "[user] Hi\n[assistant] Yes and\n[assistant] so "),
        ({"chat_template_kwargs": {"mood": "oh ", "other": [1]}}, "[user] Hi\n[assistant] Yes and\n[assistant] oh "),
        ({"documents": [{"text": "A"}, {"text": "B"}]}, "[user] Hi\n[assistant] Yes and\n<A><B>[assistant] so "),
        ({"add_generation_prompt": False}, "[user] Hi\n[assistant] Yes and\n"),
        ({"continue_final_message": True}, "[user] Hi\n[assistant] Yes and"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[user] Hi\n[assistant] Yes and"),
    ],
)
def test_the_prompt_is_what_the_template_writes_with_them(moody: Live, given: dict[str, Any], prompt: str) -> None:
    """The answer is that to the prompt as a text, in which each character is a token."""
    about = {"model": "chat", "max_tokens": 12, "temperature": 0}
    with httpx.Client(base_url=moody.url) as client:
        chat = client.post("/v1/chat/completions", json={**about, "messages": SAID, **given}).json()
        text = client.post("/v1/completions", json={**about, "prompt": prompt}).json()
    assert chat["usage"]["prompt_tokens"] == len(prompt)
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]


def test_variables_that_no_template_can_read_are_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="chat_template_kwargs: tools: a conversation gives the chat template this"):
        tiny("chat", WithTemplate(), ServerConfig(chat_template_kwargs={"tools": []}))
    from sheepop.tokenizer import CharTokenizer

    with pytest.raises(TokenizerError, match="has no chat template"):
        tiny("plain", CharTokenizer(), ServerConfig(chat_template_kwargs={"mood": "so "}))
