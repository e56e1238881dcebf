"""Finds what a model writes in conversations that a chat template renders, whether or not the template marks it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from sheepop.core.errors import SheepOpError
from sheepop.posttrain.rows import RowError
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.chat import Rendered
from sheepop.tokenizer.chat_forms import REASONING
from sheepop.tokenizer.messages import Message, message_text

Messages = Sequence[Message]
_KEYS = {"role", "content", "tool_calls", "tool_call_id", *REASONING}
_SAID = ("content", "reasoning_content")
_REMEDY = "Remove it, or give another template: tuning.chat_template=FILE"
_MARK = "Mark the assistant's text in it with {% generation %} ... {% endgeneration %}: tuning.chat_template=FILE"


@dataclass
class Findings:
    """What was found out about a chat template while it rendered answers.

    `ends` counts the special tokens that answers end with, and `endless` the answers without one. `apart` counts the
    answers that became examples of their own, and `unread` those that do not begin with the end of the prompt in
    generation, by that end.
    """

    ends: Counter[str] = field(default_factory=Counter)
    endless: int = 0
    apart: int = 0
    unread: Counter[str] = field(default_factory=Counter)


class _Turn(NamedTuple):
    """A conversation up to an answer: the whole text, that up to the answer's end, and the answer's spans in it.

    `unread` is the end of the prompt in generation that is not before the answer.
    """

    whole: str
    text: str
    spans: tuple[tuple[int, int], ...]
    unread: str = ""


class AnswerFinder:
    """Finds the assistant's answers in the text of a conversation.

    ``{% generation %}`` blocks of the template mark them. For a template without them, an answer begins where the
    prompt in generation and the conversation up to the answer cease to have the same tokens. It ends with the first
    token of `ends`, texts of tokens that end the model's texts, in what does not change when the message changes; if
    there is none, with the first special token that follows it in a longer conversation, too.
    """

    def __init__(self, template: ChatTemplate, special: Collection[str], ends: Collection[str]) -> None:
        self._template, self._special, self.ends = template, list(special), set(ends)
        self.findings = Findings()

    def prompt(self, messages: Messages, tools: Sequence[Any]) -> str:
        """The text of a conversation up to where an answer begins; raises `RowError` for what the template drops."""
        self._require_known_keys(messages, tools)
        changed, marks = _changed([*messages, {"role": "assistant", "content": ""}])
        other = self._render(changed[:-1], tools, add_generation_prompt=True).text
        text = self._render(messages, tools, add_generation_prompt=True).text
        _require_read(marks, other, tools)
        if self._usual_end:
            self.findings.ends[self._usual_end] += 1
        return text

    def texts(
        self, messages: Messages, learnt: Sequence[int], tools: Sequence[Any], tokens: Callable[[str], list[int]]
    ) -> list[Rendered]:
        """The texts to learn from, with the spans of the answers that have the numbers `learnt`, in order.

        Answers share a text if it begins with the conversation up to their end; where the template renders earlier
        turns differently, an answer has a text of its own, as in generation. `tokens` encodes a text. Raises `RowError`
        for what the template drops.
        """
        self._require_known_keys(messages, tools)
        if self._usual_end:
            self.ends.add(self._usual_end)
        turns = {number: self._turn(messages[: number + 1], tools, tokens) for number in learnt}
        last = turns[learnt[-1]]
        whole = last.whole if last.whole.startswith(last.text) else last.text
        shared, apart = list[tuple[int, int]](), []
        for number, turn in turns.items():
            text, spans = whole, tuple(span for span in turn.spans if whole.startswith(turn.text[: span[1]]))
            if _unsaid(messages[number], text, spans):
                text, spans = turn.text, turn.spans
                apart.append(Rendered(text, spans))
                if unsaid := _unsaid(messages[number], text, spans):
                    marks = self._template.marks_answers(with_tools=bool(tools))
                    more = ", or does not mark it as written by the model" if marks else ""
                    raise RowError(
                        f"messages[{number}].{unsaid}: the chat template leaves out this field{more}. {_REMEDY}"
                    )
            else:
                shared += spans
            self._note(text[: spans[-1][1]], turn.unread)
        self.findings.apart += len(apart)
        return [*apart, *([Rendered(whole, tuple(shared))] if shared else [])]

    @cached_property
    def _usual_end(self) -> str | None:
        """The special token that ends a plain answer, if the template writes one."""
        plain = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        try:
            return self._end_of(self._turn(plain, (), lambda _: []).text)
        except RowError:
            return None

    def _end_of(self, text: str) -> str | None:
        found = [token for token in self._special if text.rstrip().endswith(token)]
        return max(found, key=len, default=None)

    def _note(self, text: str, unread: str) -> None:
        end = self._end_of(text)
        if end is None:
            self.findings.endless += 1
        else:
            self.findings.ends[end] += 1
        if unread:
            self.findings.unread[unread] += 1

    def _require_known_keys(self, messages: Messages, tools: Sequence[Any]) -> None:
        """Raises `RowError` for a key of a message that changes nothing in the text."""
        unknown = {
            key: number
            for number, message in enumerate(messages)
            for key, value in message.items()
            if value and key not in (_KEYS | {"name"} if message["role"] == "tool" else _KEYS)
        }
        for key, number in unknown.items():
            without = [{name: value for name, value in each.items() if name != key} for each in messages]
            if self._render(without, tools).text == self._render(messages, tools).text:
                raise RowError(f"messages[{number}].{key}: neither SheepOp nor the chat template reads it. {_REMEDY}")

    def _turn(self, messages: Messages, tools: Sequence[Any], tokens: Callable[[str], list[int]]) -> _Turn:
        """Finds the last message of a conversation, an answer."""
        whole, marked = self._render(messages, tools)
        changed, marks = _changed(messages)
        other, other_marked = self._render(changed, tools)
        _require_read(marks, other, tools)
        own = [mark for where, mark in marks.items() if where.startswith(f"messages[{len(messages) - 1}]")]
        if self._template.marks_answers(with_tools=bool(tools)):
            first = (n for n, (begin, end) in enumerate(other_marked) if any(mark in other[begin:end] for mark in own))
            spans = marked[max(0, next(first, len(other_marked)) - len(other_marked) + len(marked)) :]
            return _Turn(whole, whole[: spans[-1][1]] if spans else "", spans)
        before = self._render(messages[:-1], tools, add_generation_prompt=True).text
        begin = _in_common(before, whole)
        if begin < len(before):
            ids = tokens(before)
            while (found := tokens(whole[:begin])) != ids[: len(found)]:
                begin -= 1
            # An answer may begin with the letters of what the prompt has in its place.
            said = next((each for name in reversed(_SAID) if (each := (messages[-1].get(name) or "").strip())), "")
            place = whole.rfind(said, 0, begin + len(said) - 1)
            begin = place if 0 <= place < begin < place + len(said) else begin
        tail = whole[len(whole) - _in_common(whole[::-1], other[::-1]) :]
        text = self._ended(whole.removesuffix(tail), tail, messages, changed, tools)
        if not any(end in before[begin:] for end in self.ends):
            return _Turn(whole, text, ((begin, len(text)),), before[begin:])
        said = other[: min(other.find(mark) for mark in own)]
        answer = _behind(before.removeprefix(self._render(messages[:-1], tools).text), said, text)
        return _Turn(whole, before + answer, ((len(before), len(before) + len(answer)),))

    def _ended(self, text: str, tail: str, messages: Messages, changed: Messages, tools: Sequence[Any]) -> str:
        """`text` up to the end of an answer; `tail` stands behind it, whatever the answer is."""
        end = self._first(tail, self._special)
        if end and tail[:end].endswith(tuple(self.ends)):
            return text + tail[:end]
        following = self._following(tail, messages, changed, tools)
        same = _in_common(tail, following)
        has_calls = bool(messages[-1].get("tool_calls"))
        end = (
            self._first(tail[:same], self.ends)
            or (0 if has_calls else self._first(tail[:same], self._special))
            or self._first(tail, self.ends)
        )
        if end:
            return text + tail[:end]
        further = following[same:].lstrip()
        if further.startswith(tuple(self.ends)):
            return text + following[: len(following) - len(further) + self._first(further, self.ends)]
        # Both may have the first letters of different tokens.
        cut = (place for token in self._special if 0 <= (place := tail.find(token)) < same < place + len(token))
        return text + tail[: min(cut, default=same)]

    def _following(self, tail: str, messages: Messages, changed: Messages, tools: Sequence[Any]) -> str:
        """What stands behind an answer if the conversation continues, whatever the answer is; `tail` if it cannot."""
        more: list[Message] = [
            {"role": "tool", "name": _function(call)["name"], "tool_call_id": call.get("id"), "content": "."}
            for call in messages[-1].get("tool_calls") or ()
        ] or [{"role": "user", "content": "."}]
        try:
            first, second = (self._render([*each, *more], tools).text for each in (messages, changed))
        except RowError:
            return tail
        return first[len(first) - _in_common(first[::-1], second[::-1]) :]

    def _first(self, text: str, tokens: Collection[str]) -> int:
        """Where the first of `tokens` in a text ends; 0 if there is none."""
        found = [(place, -len(token)) for token in tokens if (place := text.find(token)) >= 0]
        place, size = min(found, default=(0, 0))
        return place - size

    def _render(self, messages: Messages, tools: Sequence[Any], **options: Any) -> Rendered:
        given = list(tools) or None
        try:
            if options:
                return Rendered(self._template.render(messages, tools=given, **options))
            return self._template.render_marked(messages, tools=given)
        except SheepOpError as error:
            raise RowError(str(error)) from None


def _in_common(first: str, second: str) -> int:
    """The number of characters that two texts begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first.startswith(second[low:middle], low) else (low, middle - 1)
    return low


def _behind(header: str, said: str, text: str) -> str:
    """The answer at the end of `text`, for a template that renders earlier turns differently in a prompt.

    It stands behind the `header` that a prompt ends with, the last one in `said`, a text that ends in the answer.
    """
    said = said[said.rfind(header) :]
    place = text.rfind(said)
    if not header or not said.startswith(header) or place < 0:
        raise RowError(f"the chat template renders earlier turns differently in a prompt for generation. {_MARK}")
    return text[place + len(header) :]


def _changed(messages: Messages) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The conversation with a mark in every message but earlier answers, and the marks by their fields.

    In the last message they stand at the end, and end with a letter that does not stand there already.
    """
    key, last, marks = secrets.token_hex(8), messages[-1], dict[str, str]()
    letters = {str(last.get(name) or "").rstrip()[-1:] for name in _SAID}
    letter = next(each for each in "wxyz" if each not in letters)

    def mark(where: str) -> str:
        return marks.setdefault(where, f"{key}{len(marks)}{letter}")

    found = [dict(message) for message in messages]
    for number, message in enumerate(found[:-1]):
        if message["role"] != "assistant" and (said := message_text(message)).strip():
            middle = len(said) // 2
            message["content"] = said[:middle] + mark(f"messages[{number}].content") + said[middle:]
    where = f"messages[{len(messages) - 1}]"
    for name in ("content", *REASONING):
        if str(last.get(name) or "").strip():
            found[-1][name] = last[name] + mark(f"{where}.{'content' if name == 'content' else 'reasoning_content'}")
    if calls := last.get("tool_calls"):
        found[-1]["tool_calls"] = [
            _marked_call(call, mark(f"{where}.tool_calls[{place}]")) for place, call in enumerate(calls)
        ]
    return found, marks


def _require_read(marks: Mapping[str, str], text: str, tools: Sequence[Any]) -> None:
    """Raises `RowError` for a field whose mark is not in a text, or a tool whose name is not."""
    names = {f"tools[{n}]": str(_function(tool).get("name", "")) for n, tool in enumerate(tools)}
    for where, mark in {**names, **marks}.items():
        if mark not in text:
            raise RowError(f"{where}: the chat template leaves out this field. {_REMEDY}")


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A call with one more argument; arguments that are no object get the mark at their end."""
    function = _function(call)
    given = function.get("arguments") or {}
    arguments = {**given, mark: mark} if isinstance(given, Mapping) else f"{given}{mark}"
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = call.get("function", call)
    return found


def _unsaid(message: Message, text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The first field of an answer that is not in the spans of a text, whitespace aside; empty if all are."""
    written = "".join("".join(text[begin:end] for begin, end in spans).split())
    said = {name: message.get(name) for name in _SAID}
    calls = {f"tool_calls[{n}]": _function(call)["name"] for n, call in enumerate(message.get("tool_calls") or ())}
    return next((name for name, each in {**said, **calls}.items() if "".join((each or "").split()) not in written), "")
