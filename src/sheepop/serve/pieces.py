"""The choices of answers, whole or as pieces of a stream, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sheepop.generate.request import Candidate
from sheepop.serve.answers import Answer, chat_logprobs, finish_reason, text_logprobs, tool_calls
from sheepop.serve.protocol import ChatRequest, CompletionRequest

DONE = "data: [DONE]\n\n"
_MARK = "<tool_call>"


def event(value: Mapping[str, Any]) -> str:
    """Formats a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


class TextPieces:
    """The choices of ``/v1/completions``."""

    def __init__(self, answer: Answer, requested: CompletionRequest) -> None:
        self._answer, self._requested = answer, requested
        self._sent_tokens: dict[int, int] = {}

    def whole(self, candidate: Candidate, number: int) -> dict[str, Any]:
        """A finished choice."""
        prompt = candidate.request.prompt.text if self._requested.echo else ""
        return {
            "index": number,
            "text": prompt + candidate.text,
            "logprobs": self._logprobs(candidate, 0),
            "finish_reason": finish_reason(candidate),
        }

    def piece(self, candidate: Candidate, number: int, text: str) -> list[dict[str, Any]]:
        """The new piece of a choice after a step, if there is one."""
        first = self._sent_tokens.get(number)
        if first is None and self._requested.echo:
            text = candidate.request.prompt.text + text
        first, self._sent_tokens[number] = first or 0, len(candidate.token_ids)
        if not text and candidate.finish_reason is None:
            self._sent_tokens[number] = first
            return []
        logprobs = self._logprobs(candidate, first)
        return [{"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(candidate)}]

    def _logprobs(self, candidate: Candidate, first: int) -> dict[str, Any] | None:
        if self._requested.logprobs is None:
            return None
        offset = len(candidate.request.prompt.text) if self._requested.echo else 0
        return text_logprobs(candidate, self._answer.model, offset, first)


class ChatPieces:
    """The choices of ``/v1/chat/completions``."""

    def __init__(self, answer: Answer, requested: ChatRequest) -> None:
        self._answer, self._requested = answer, requested
        self._sent_tokens: dict[int, int] = {}
        self._sent_characters: dict[int, int] = {}
        self._may_call = bool(requested.tools) and requested.tool_choice != "none"

    def whole(self, candidate: Candidate, number: int) -> dict[str, Any]:
        """A finished choice."""
        said, calls = tool_calls(candidate.text, self._requested)
        message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(candidate, self._answer.model) if self._requested.logprobs else None
        reason = "tool_calls" if calls else finish_reason(candidate)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def piece(self, candidate: Candidate, number: int, text: str) -> list[dict[str, Any]]:
        """The new pieces of a choice after a step: the role, once, then text, tool calls, and the finish reason."""
        found = []
        if number not in self._sent_tokens:
            self._sent_tokens[number] = self._sent_characters[number] = 0
            found.append(self._choice(number, {"role": "assistant", "content": "", "refusal": None}))
        over = candidate.finish_reason is not None
        calls: list[dict[str, Any]] = []
        if self._may_call:
            said, calls = tool_calls(candidate.text, self._requested) if over else (self._certain(candidate.text), [])
            text = said[self._sent_characters[number] :]
            self._sent_characters[number] += len(text)
        if text:
            first, self._sent_tokens[number] = self._sent_tokens[number], len(candidate.token_ids)
            logprobs = chat_logprobs(candidate, self._answer.model, first) if self._requested.logprobs else None
            found.append(self._choice(number, {"content": text}, logprobs=logprobs))
        if calls:
            numbered = [{"index": index, **call} for index, call in enumerate(calls)]
            found.append(self._choice(number, {"tool_calls": numbered}))
        if over:
            found.append(self._choice(number, {}, reason="tool_calls" if calls else finish_reason(candidate)))
        return found

    def _certain(self, text: str) -> str:
        """The prefix of a text that is not part of a tool call, whatever follows."""
        if self._requested.tool_choice not in (None, "auto"):
            return ""
        before, mark, _ = text.partition(_MARK)
        if mark:
            return before.rstrip()
        withheld = next((size for size in range(len(_MARK) - 1, 0, -1) if text.endswith(_MARK[:size])), 0)
        return text[: len(text) - withheld].rstrip()

    def _choice(
        self, number: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
