"""Tool calls in free text: found whole, streamed in pieces, and otherwise left as text."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from sheepop.generate.request import FinishReason, Request
from sheepop.generate.updates import Update
from sheepop.serve.answer_text import AnswerText
from sheepop.serve.answers import Answer
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.formats import format_of
from sheepop.serve.pieces import ChatPieces

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
BOTH = ["weather", "time"]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


def chat(**more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **more})


def tool_calls(text: str, requested: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    part = AnswerText(requested, format_of("")).push(text, is_last=True)
    return part.said, part.calls


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ("No tool.", "No tool.", []),
        (CALL, "", ["weather"]),
        (f'Let me see. {CALL} and <tool_call>{{"name": "time"}}</tool_call>', "Let me see.  and", BOTH),
        ('<tool_call>{"name": "nosuch"}</tool_call>', '<tool_call>{"name": "nosuch"}</tool_call>', []),
        (f'{CALL} then <tool_call>{{"name"', 'then <tool_call>{"name"', ["weather"]),
        (f"<tool_call>no JSON</tool_call>{CALL}", "<tool_call>no JSON</tool_call>", ["weather"]),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
    ],
)
def test_a_call_is_one_of_a_tool_that_was_offered(text: str, said: str, names: list[str]) -> None:
    found, calls = tool_calls(text, chat())
    assert (found, [call["function"]["name"] for call in calls]) == (said, names)
    assert tool_calls(text, chat(tool_choice="none")) == (text, [])


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_a_stream_says_what_the_whole_answer_says(step: int) -> None:
    """For any split into pieces, and never the beginning of a call."""
    text = f"Let me see. {CALL} Done <tool_call>{{"
    pieces = ChatPieces(cast(Answer, None), chat(), lambda: AnswerText(chat(), format_of("")))
    said, calls = "", []
    for start in range(0, len(text), step):
        piece = text[start : start + step]
        reason: FinishReason | None = "stop" if start + step >= len(text) else None
        update = Update(cast(Request, None), 0, piece, finish_reason=reason)
        for choice in pieces.piece(update, 0):
            said += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls", [])
    whole, expected = tool_calls(text, chat())
    assert said == whole == "Let me see.  Done <tool_call>{"
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Bern"}] and len(expected) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "system", "content": None},
        {"role": "assistant"},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "a", "refusal": "no"},
    ],
)
def test_a_message_has_content_or_calls(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"content|refusal"):
        ChatRequest.model_validate({"model": "m", "messages": [message]})
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [called]}]}
    )
