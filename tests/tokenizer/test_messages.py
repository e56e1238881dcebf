"""What is a valid message of a chat, and how the field of an invalid one is named."""

from __future__ import annotations

from typing import Any

import pytest

from sheepop.tokenizer.messages import MessageError, check_last, check_messages, message_text, plain_messages

PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
ASK = {"role": "user", "content": PARTS}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL, {"name": "add", "arguments": {}}]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}


def test_messages_with_parts_and_tool_calls_are_valid_and_stay_as_they_are() -> None:
    assert check_messages([ASK, CALLS, RESULT], "messages") == (ASK, CALLS, RESULT)
    assert [message_text(message) for message in (ASK, CALLS, RESULT)] == ["2 + 2?", "", "4"]
    assert check_messages([], "messages") == ()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "messages: is not a list"),
        ([ASK, "Hi"], r"messages\[1\]: is not an object"),
        (
            [{"role": ["user"], "content": "x"}],
            r"messages\[0\]\.role: is \['user'\], not one of system",
        ),
        ([{"role": "user"}], r"messages\[0\]\.content: is not a text; only an answer"),
        ([{"role": "user", "content": 4}], r"messages\[0\]\.content: is not a text$"),
        ([{"role": "user", "content": [*PARTS, {"type": "image"}]}], r"messages\[0\]\.content\[2\]: is not a part"),
        ([{**CALLS, "role": "user"}], r"messages\[0\]\.content: is not a text"),
        ([{**CALLS, "tool_calls": []}], r"messages\[0\]\.content: is not a text"),
        ([{**CALLS, "tool_calls": CALL}], r"messages\[0\]\.tool_calls: is not a list of calls"),
        ([{**CALLS, "tool_calls": [{"function": {}}]}], r"messages\[0\]\.tool_calls: is not a list of calls"),
    ],
)
def test_the_first_invalid_field_is_named(messages: Any, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        check_messages(messages, "messages")


def test_the_last_message_may_have_to_be_somebodys() -> None:
    check_last([ASK], "prompt", ("user", "tool"))
    with pytest.raises(MessageError, match=r"prompt\[1\]\.role: is assistant, but the last message is the user's"):
        check_last([ASK, CALLS], "prompt", ("user", "tool"))
    with pytest.raises(MessageError, match="prompt: is empty"):
        check_last([], "prompt", ("user",))


def test_plain_messages_have_texts_and_no_tools() -> None:
    assert plain_messages([{**ASK, "name": "me"}], "m") == [{"role": "user", "content": "2 + 2?", "name": "me"}]
    with pytest.raises(MessageError, match=r"m\[0\]\.role: is 'tool'"):
        plain_messages([RESULT], "m")
    with pytest.raises(MessageError, match=r"m\[0\]\.tool_calls: are not read here"):
        plain_messages([{**CALLS, "content": "x"}], "m")
