"""The forms of conversations that chat templates expect, which differ from those of files and clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sheepop.tokenizer.messages import Message

# The keys under which a message may have its reasoning. Templates read the first, those of gpt-oss the second.
REASONING = ("reasoning_content", "thinking", "reasoning")

# In a template that asks for it, a message with nothing but calls has no content at all.
_ASKS_FOR_NONE = re.compile(r"\bcontent['\"]?\]?\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)


def as_template_reads(message: Message) -> dict[str, Any]:
    """A message without null, with arguments of calls as objects, and its reasoning under each key templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := present.get("tool_calls"), list):
        present["tool_calls"] = [_with_arguments(call) for call in calls]
    reasoning = next((present[name] for name in REASONING if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object; OpenAI's API writes them as JSON text, and an empty text for none."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            found = json.loads((arguments or "").strip() or "{}")
            # Any other text stays as it is.
            function = {**function, "arguments": found if isinstance(found, dict) else arguments}
    return {**call, "function": function} if "function" in call else function


def forms_of(messages: list[dict[str, Any]], template: str) -> list[list[dict[str, Any]]]:
    """The forms of a conversation that a template may expect; it fails with a `TypeError` for any other.

    Some templates ask whether the content of a message with calls is none; some join the arguments of calls to text.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    forms = [messages]
    if _ASKS_FOR_NONE.search(template):
        bare = [
            {**each, "content": each.get("content") or None} if each.get("tool_calls") else each for each in messages
        ]
        forms = [bare, messages]
    return [each for form in forms for each in (form, [_with_text(message) for message in form])]


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts of type text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), Mapping):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


def without_null(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool and its function without keys that are null; in a JSON schema, null is a value."""
    return {
        name: {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else value
        for name, value in tool.items()
        if value is not None
    }
