"""The choices of answers, whole or in pieces: what an update of the engine adds to the answer of a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sheepop.generate.request import Request
from sheepop.generate.updates import Update
from sheepop.serve.answer_text import AnswerText, Part
from sheepop.serve.answers import Answer
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.logprobs import TextLogprobs, Tokens, chat_logprobs
from sheepop.serve.protocol import CompletionRequest

_FINISH = {None: None, "stop": "stop", "length": "length", "abort": "stop"}


def number_of(update: Update) -> int:
    """The index of a text among the answer's choices while it streams."""
    return update.index + update.request.index * update.request.num_candidates


class TextPieces:
    """The choices of ``/v1/completions``; `scored` are the prompts' tokens, if they are shown with the answer."""

    def __init__(self, answer: Answer, requested: CompletionRequest, scored: Sequence[Tokens] = ()) -> None:
        self._tokenizer, self._requested, self._scored = answer.model.tokenizer, requested, scored
        self._unsent: dict[int, Tokens] = {}
        self._logprobs: dict[int, TextLogprobs] = {}

    def add(self, update: Update, number: int) -> None:
        """Takes an update of a choice that is shown as a whole, of which its end has everything."""

    def whole(self, update: Update, number: int) -> dict[str, Any]:
        """A finished choice."""
        (choice,) = self.piece(update, number)
        return choice

    def piece(self, update: Update, number: int) -> list[dict[str, Any]]:
        """The new piece of a choice after a step, if there is one."""
        text = update.text
        if number not in self._unsent:
            self._unsent[number] = self._begun(update.request, number)
            if self._requested.echo:
                text = update.request.prompt.text + text
        unsent = self._unsent[number]
        unsent.add(update.token_ids, update.logprobs, update.likeliest)
        if not text and update.finish_reason is None:
            return []
        self._unsent[number] = Tokens()
        logprobs = self._logprobs[number].shown(unsent) if number in self._logprobs else None
        reason = _FINISH[update.finish_reason]
        return [{"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason, **_stop(update)}]

    def _begun(self, request: Request, number: int) -> Tokens:
        if self._requested.logprobs is None:
            return Tokens()
        continues = request.continues and not self._requested.echo
        self._logprobs[number] = TextLogprobs(self._tokenizer, 0, continues=continues)
        tokens = Tokens()
        if self._requested.echo:
            scored = self._scored[request.index]
            tokens.add(scored.token_ids, scored.logprobs, scored.likeliest)
        return tokens


@dataclass
class _Begun:
    """A choice in progress: what splits its text, what that has found, and the tokens since its last piece."""

    text: AnswerText
    parts: list[Part] = field(default_factory=list)
    num_calls: int = 0
    unsent: Tokens = field(default_factory=Tokens)


class ChatPieces:
    """The choices of ``/v1/chat/completions``; `text` makes what splits the text of one."""

    def __init__(self, answer: Answer, requested: ChatRequest, text: Callable[[], AnswerText]) -> None:
        self._answer, self._requested, self._text = answer, requested, text
        self._begun: dict[int, _Begun] = {}

    def add(self, update: Update, number: int) -> Part:
        """Takes the update of a choice; returns what it makes certain."""
        if number not in self._begun:
            self._begun[number] = _Begun(self._text())
        begun = self._begun[number]
        begun.unsent.add(update.token_ids, update.logprobs, update.likeliest)
        reasons = begun.text.reasons
        part = begun.text.push(update.text, is_last=update.finish_reason is not None)
        if reasons or part.reasoning:
            self._answer.num_reasoning += len(update.token_ids)
        begun.parts.append(part)
        begun.num_calls += len(part.calls)
        return part

    def whole(self, update: Update, number: int) -> dict[str, Any]:
        """A finished choice, whose updates were added; `update` has its end."""
        message = self.message(number)
        reason = "tool_calls" if "tool_calls" in message else _FINISH[update.finish_reason]
        logprobs = self._logprobs(number)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason, **_stop(update)}

    def message(self, number: int) -> dict[str, Any]:
        """The message of a choice, as far as its updates were added."""
        parts = self._begun[number].parts
        said, reasoning = "".join(part.said for part in parts), "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.calls]
        message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def piece(self, update: Update, number: int) -> list[dict[str, Any]]:
        """The new pieces of a choice after a step: the role, once, then text, tool calls, and the finish reason."""
        found = []
        if number not in self._begun:
            role = {"role": "assistant", "content": "", "refusal": None}
            found.append({"index": number, "delta": role, "logprobs": None, "finish_reason": None})
        part = self.add(update, number)
        count = self._begun[number].num_calls
        if part.reasoning:
            found.append(self._choice(number, {"reasoning_content": part.reasoning}))
        if part.said:
            found.append(self._choice(number, {"content": part.said}))
        if part.calls:
            numbered = [{"index": index, **call} for index, call in enumerate(part.calls, count - len(part.calls))]
            found.append(self._choice(number, {"tool_calls": numbered}))
        if update.finish_reason is not None:
            reason = "tool_calls" if count else _FINISH[update.finish_reason]
            found.append({**self._choice(number, {}, reason), **_stop(update)})
        return found

    def _choice(self, number: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": self._logprobs(number), "finish_reason": reason}

    def _logprobs(self, number: int) -> dict[str, Any] | None:
        """The log-probabilities of the tokens since the last piece; each is sent once."""
        tokens, self._begun[number].unsent = self._begun[number].unsent, Tokens()
        if not self._requested.logprobs or not tokens.token_ids:
            return None
        return chat_logprobs(tokens, self._answer.model.tokenizer)


def _stop(update: Update) -> dict[str, str]:
    """The stop string that ended a text; not in OpenAI's API, and named as by other servers."""
    return {} if update.stop is None else {"stop_reason": update.stop}
