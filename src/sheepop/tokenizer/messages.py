"""Messages of a chat: the roles, contents and tool calls that files, judges and the server accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


class MessageError(ValueError):
    """An invalid message; the text begins with its field, such as ``messages[1].role``."""


def check_messages(messages: Any, name: str, roles: Sequence[str] = ROLES) -> tuple[Message, ...]:
    """Returns the messages in the field `name` as a tuple; raises `MessageError` naming the first invalid field."""
    if not isinstance(messages, list):
        raise MessageError(f"{name}: is not a list of messages")
    found = []
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise MessageError(f"{where}: is not an object with role and content")
        message = with_tool_calls(message, f"{where}.")
        found.append(message)
        if (role := message.get("role")) not in roles:
            raise MessageError(f"{where}.role: is {role!r}, not one of {', '.join(roles)}")
        check_content(message, f"{where}.")
    return tuple(found)


def with_tool_calls(message: Message, where: str = "") -> Message:
    """The message with a `function_call`, OpenAI's former key, as a tool call, and role ``function`` as ``tool``.

    These have no ids, so the function's name is the id. Raises `MessageError`, with `where` before the field.
    """
    found = {key: value for key, value in message.items() if key != "function_call"}
    if message.get("role") == "function":
        if not isinstance(name := message.get("name"), str):
            raise MessageError(f"{where}name: is not the name of the function whose answer this is")
        found |= {"role": "tool", "tool_call_id": name}
    if (call := message.get("function_call")) is not None:
        if message.get("tool_calls"):
            raise MessageError(f"{where}function_call: is there beside tool_calls; leave out one")
        if not _is_call(call) or "function" in call:
            raise MessageError(f"{where}function_call: is not a call with the name of a function")
        found["tool_calls"] = [{"id": call["name"], "type": "function", "function": call}]
    return found


def check_last(messages: Sequence[Message], name: str, roles: Sequence[str]) -> None:
    """Raises `MessageError` unless there are messages and the role of the last is one of `roles`."""
    if not messages:
        raise MessageError(f"{name}: is empty")
    if (last := messages[-1]["role"]) not in roles:
        raise MessageError(f"{name}[{len(messages) - 1}].role: is {last}, but the last message is the {roles[0]}'s")


def check_content(message: Message, where: str = "") -> None:
    """Checks the content and the tool calls of a message; raises `MessageError`, with `where` before the field.

    The content is a text or a list of text parts. Only the assistant's messages with tool calls may have none.
    """
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise MessageError(f"{where}tool_calls: is not a list of calls, each with the name of a function")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise MessageError(f"{where}content[{number}]: is not a part of type text")
    elif content is None and message["role"] == "assistant" and calls:
        return
    elif not isinstance(content, str):
        hint = "; only an answer of the assistant that calls tools has none" if content is None else ""
        raise MessageError(f"{where}content: is not a text{hint}")


def message_text(message: Message) -> str:
    """The text of a message's content, its parts joined; empty without content."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def plain_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """The messages of system, user and assistant as texts; raises `MessageError` as `check_messages`, or for calls."""
    checked = check_messages(messages, name, ("system", "user", "assistant"))
    for number, message in enumerate(checked):
        if message.get("tool_calls"):
            raise MessageError(f"{name}[{number}].tool_calls: are not read here; only texts are")
    return [{**message, "content": message_text(message)} for message in checked]


def _is_call(call: Any) -> bool:
    """Whether `call` has the name of a function, under ``function`` as OpenAI has it, or directly."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
