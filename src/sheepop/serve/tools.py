"""Tool calls in the text of an answer, found while it grows."""

from __future__ import annotations

import json
import secrets
from typing import Any

from sheepop.serve.protocol import ChatRequest, ToolChoice

_BEGIN, _END = "<tool_call>", "</tool_call>"


def must_call(requested: ChatRequest) -> bool:
    """Whether the whole answer must be a tool call."""
    return isinstance(requested.tool_choice, ToolChoice) or requested.tool_choice == "required"


def tool_calls(text: str, requested: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """Splits a whole answer; see `ToolText`."""
    return ToolText(requested).push(text, is_last=True)


class ToolText:
    """Splits the pieces of an answer into what is said and tool calls: the required one, or those in ``<tool_call>``.

    Whatever the pieces are, the results add up to those for the whole answer. Text that is no call of a tool of the
    request stays text. Whitespace around calls is said only between other text.
    """

    def __init__(self, requested: ChatRequest) -> None:
        self._names = {tool.function.name for tool in requested.tools or () if requested.tool_choice != "none"}
        self._must_call, self._one_call = must_call(requested), requested.parallel_tool_calls is False
        self._held = self._spaces = ""
        self._has_said, self._num_calls = False, 0

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Returns what the next piece makes certain: text to say, and complete calls."""
        if not self._names:
            return text, []
        self._held += text
        if self._must_call:
            return self._required() if is_last else ("", [])
        said, calls = "", []
        while _END in self._held and not (self._one_call and self._num_calls):
            before, begin, after = self._held.partition(_BEGIN)
            body, end, rest = after.partition(_END)
            if not end:
                break
            said += self._say(before)
            try:
                calls.append(self._call(body))
            except ValueError:
                said += self._say(begin + body + end)
            self._held = rest
        certain = len(self._held) if is_last else self._num_certain()
        said, self._held = said + self._say(self._held[:certain]), self._held[certain:]
        if is_last and not self._num_calls:
            said, self._spaces = said + self._spaces, ""
        return said, calls

    def _num_certain(self) -> int:
        """The number of held characters that are no part of a call, whatever follows."""
        if self._one_call and self._num_calls:
            return len(self._held)
        if (found := self._held.find(_BEGIN)) >= 0:
            return found
        sizes = range(len(_BEGIN) - 1, 0, -1)
        return len(self._held) - next((size for size in sizes if self._held.endswith(_BEGIN[:size])), 0)

    def _say(self, text: str) -> str:
        """`text` after the whitespace before it; whitespace at its end waits for more text."""
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        if said and not self._has_said and self._num_calls:
            said = said.lstrip()
        self._has_said = self._has_said or bool(said)
        return said

    def _required(self) -> tuple[str, list[dict[str, Any]]]:
        try:
            return "", [self._call(self._held)]
        except ValueError:  # the length limit cut it
            return self._held, []

    def _call(self, text: str) -> dict[str, Any]:
        """Returns the tool call object of OpenAI's API; raises `ValueError` if `text` calls no tool of the request."""
        try:
            found = json.loads(text)
            arguments = _arguments(found["arguments"]) if isinstance(found, dict) and "arguments" in found else "{}"
        except RecursionError:
            raise ValueError("the call is nested too deeply") from None
        if not isinstance(found, dict) or found.get("name") not in list(self._names):
            raise ValueError("a call is an object with the name of a tool of the request")
        self._num_calls += 1
        function = {"name": found["name"], "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _arguments(found: Any) -> str:
    """Arguments as JSON text; an object that the model wrote as text is not encoded again, and empty text is `{}`."""
    if isinstance(found, str):
        try:
            if not found.strip() or isinstance(json.loads(found), dict):
                return found.strip() or "{}"
        except ValueError:
            pass
    return json.dumps(found)
