"""What clients send without being asked is taken; an answer's message goes back as it came."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.generate.engine import BLOCK_SIZE
from sheepop.generate.paged_cache import bytes_per_block
from sheepop.serve.answer_text import AnswerText
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.formats import format_of

from .conftest import Live, WithTemplate, tiny

ASKED = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
TOOL = {"type": "function", "function": {"name": "weather"}}


def answer(live: Live, **more: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/chat/completions", json={**ASKED, **more}, timeout=60)


def test_null_is_no_value_for_every_field_that_may_be_left_out(live: Live) -> None:
    names = {field.alias or name for name, field in ChatRequest.model_fields.items()} - {"model", "messages"}
    expected = answer(live).json()["choices"]
    found = answer(live, **{**dict.fromkeys([*names, "audio", "prediction"]), **ASKED})
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == expected


def test_fields_that_change_no_answer_are_taken(live: Live) -> None:
    harmless = {
        "parallel_tool_calls": True, "store": False, "metadata": {"run": "1"}, "service_tier": "auto", "user": "me",
        "prompt_cache_key": "k", "reasoning_effort": "low", "functions": [], "modalities": ["text"], "tools": [],
        "tool_choice": "auto",
    }  # fmt: skip
    found = answer(live, **harmless)
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == answer(live).json()["choices"]
    refused = answer(live, functions=[{"name": "f"}])
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    assert refused.json()["error"]["param"] == "functions"


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}])
def test_the_message_of_an_answer_goes_back_as_it_came(live: Live, more: dict[str, Any]) -> None:
    said = answer(live, **more).json()["choices"][0]["message"]
    beside = {"annotations": [], "audio": None, "function_call": None, "reasoning_content": "I think."}
    found = answer(live, messages=[*ASKED["messages"], {**said, **beside}, {"role": "user", "content": "And?"}])
    assert found.status_code == 200, found.text


def test_a_tool_is_shown_to_the_template_as_it_was_sent() -> None:
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    sent = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "time"}}]
    called = {"id": "c", "type": "function", "function": {"name": "time", "arguments": ""}}
    messages = [*ASKED["messages"], {"role": "assistant", "tool_calls": [called]}]
    requested = ChatRequest.model_validate({**ASKED, "messages": messages, "tools": sent})
    assert requested.for_template()["tools"] == sent
    assert requested.messages[1].to_template()["tool_calls"][0]["function"]["arguments"] == {}


def test_former_function_calls_are_tool_calls() -> None:
    """What the template gets of OpenAI's former form is what it gets of the present one."""
    function, answer = {"name": "time", "arguments": '{"zone": "CET"}'}, {"content": "noon", "name": "time"}
    former = [{"role": "assistant", "function_call": function}, {"role": "function", **answer}]
    call = {"id": "time", "type": "function", "function": function}
    present = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "time", **answer}]
    found, expected = (
        [each.to_template() for each in ChatRequest.model_validate({**ASKED, "messages": said}).messages]
        for said in (former, present)
    )
    assert found == expected
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"zone": "CET"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', '{"a": 1}'), ('"{\\"a\\": 1}"', '{"a": 1}'), ('""', "{}"), ('"text"', '"text"')],
)
def test_arguments_that_a_model_writes_as_text_are_not_encoded_again(arguments: str, expected: str) -> None:
    requested = ChatRequest.model_validate({**ASKED, "tools": [TOOL]})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert AnswerText(requested, format_of("")).push(text, is_last=True).calls[0]["function"]["arguments"] == expected


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PARTS = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "{", " ", "\n", "a", "ß ", "<tool_call>x</tool_call>"]
)


@given(st.lists(PARTS, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_whatever_the_pieces_are_they_add_up_to_the_whole(parts: list[str], sizes: list[int], several: bool) -> None:
    requested = ChatRequest.model_validate({**ASKED, "tools": [TOOL], "parallel_tool_calls": several})
    text = "".join(parts)
    whole = AnswerText(requested, format_of("")).push(text, is_last=True)
    expected, calls = whole.said, whole.calls
    stream, said, found, start = AnswerText(requested, format_of("")), "", 0, 0
    while start < len(text):
        size = sizes[start % len(sizes)]
        part = stream.push(text[start : start + size])
        said, found, start = said + part.said, found + len(part.calls), start + size
    part = stream.push("", is_last=True)
    assert (said + part.said, found + len(part.calls)) == (expected, len(calls))
    assert len(calls) <= (8 if several else 1)
    if not calls:
        assert expected == text


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(live: Live) -> None:
    error = answer(live, messages=[{"role": "user", "content": "x" * 300}]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length" in error["message"]
    assert "--window" not in error["message"]


def test_the_fewest_tokens_hold_stop_strings_back_and_stop_tokens_end_a_text(live: Live) -> None:
    asked = {"model": "plain", "prompt": "Once", "max_tokens": 20, "seed": 3}
    url = f"{live.url}/v1/completions"
    text = httpx.post(url, json=asked).json()["choices"][0]["text"]
    stop = text[2]
    first = httpx.post(url, json={**asked, "stop": stop}).json()
    assert first["choices"][0]["text"] == text[: text.index(stop)]
    held = httpx.post(url, json={**asked, "stop": stop, "min_tokens": 10}).json()
    end = text.find(stop, 9)
    assert held["choices"][0]["text"] == (text if end < 0 else text[:end])
    tokens = httpx.post(f"{live.url}/tokenize", json={"model": "plain", "prompt": stop}).json()["tokens"]
    by_id = httpx.post(url, json={**asked, "stop_token_ids": tokens}).json()["choices"][0]
    assert (by_id["text"], by_id["finish_reason"]) == (text[: text.index(stop)], "stop")
    refused = httpx.post(url, json={**asked, "stop_token_ids": [999]}).json()["error"]
    assert refused["param"] == "stop_token_ids"


def test_without_a_limit_an_answer_may_be_as_long_as_the_cache_holds() -> None:
    """The cache holds 4 blocks of 16 tokens, fewer than the context of 256."""
    network = tiny("chat", WithTemplate(), ServerConfig(max_running=1))
    size = bytes_per_block(network.generator.model, BLOCK_SIZE)
    network.close()
    server = Live(ServerConfig(max_running=2, cache_memory=4 * size / 2**30), models=("chat",))
    try:
        found = answer(server, max_tokens=None, n=2)
        assert found.status_code == 200, found.text
        usage = found.json()["usage"]
        assert usage["completion_tokens"] <= 2 * (32 - usage["prompt_tokens"])
        assert answer(server, max_tokens=60).status_code == 400
    finally:
        server.close()
