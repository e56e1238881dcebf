"""Reads and validates post-training files: conversations, prompts with completions, preferences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from sheepop.core.errors import DataError
from sheepop.core.facts import counted
from sheepop.core.json_lines import BadLine
from sheepop.data.record_files import record_lines
from sheepop.posttrain.shapes import NoShapeError, recognised
from sheepop.tokenizer.messages import (
    Message,
    MessageError,
    check_last,
    check_messages,
    message_text,
    with_tool_calls,
)

Turns = str | tuple[Message, ...]
LEARNT_KEYS = {"weight", "train"}
"""The keys of a message that say whether its answer is learnt."""
_PLAIN = ("messages", "prompt", "completion", "chosen", "rejected")
FIRST_PROBLEMS = 5


@dataclass(frozen=True)
class Supervised:
    """A prompt and an answer to learn, both plain text; or a conversation, with an empty `prompt`.

    In a conversation the model learns the assistant's messages from index `learnt_from` on.
    """

    place: str
    prompt: str
    answer: Turns
    tools: tuple[Mapping[str, Any], ...] = ()
    learnt_from: int = 0


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer to one prompt; `margin` is the difference, if known."""

    place: str
    prompt: Turns
    chosen: Turns
    rejected: Turns
    margin: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Judged:
    """An answer to a prompt with a label: desirable or not."""

    place: str
    prompt: Turns
    answer: Turns
    is_desirable: bool
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer, with the other keys of its line; an answer that is there too is its `reference`."""

    place: str
    prompt: Turns
    fields: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()


Row = Supervised | Preference | Judged | Prompt
T = TypeVar("T", bound=Row)


class RowError(Exception):
    """An invalid line; the message begins with the field."""


def read_rows(
    paths: Sequence[Path],
    wanted: type[T],
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    joins_turns: bool = False,
    on_bad: Callable[[str], None] | None = None,
    changed: Counter[str] | None = None,
) -> Iterator[T]:
    """Yields the lines of all files, as `record_lines` reads them, as rows of the type `wanted`, in order.

    All lines are read even if some are bad; a `DataError` at the end counts the bad ones and names the first, with line
    and field, unless `on_bad` takes each problem. `columns` gives keys the names of shapes, such as ``prompt`` for
    ``question``. With `joins_turns`, neighbouring turns of one role become one. `changed` counts the conversations that
    were changed, in words. Arena votes that prefer neither answer are skipped when preferences are wanted.
    """
    problems: list[str] = []
    num_bad = num_rows = num_undecided = 0
    for path in paths:
        for place, value in record_lines(path):
            num_rows += 1
            if wanted is Preference and _is_undecided(value):
                num_undecided += 1
                continue
            try:
                row = _row(value, place, wanted, columns, joins_turns, Counter() if changed is None else changed)
            except (RowError, MessageError) as error:
                if on_bad is not None:
                    on_bad(f"{place}: {error}")
                    continue
                num_bad, problems = num_bad + 1, [*problems, f"{place}: {error}"][:FIRST_PROBLEMS]
                continue
            if not num_bad:
                yield row
    if num_bad:
        more = "" if num_bad == len(problems) else f"\n... and {counted(num_bad - len(problems), 'further line')}."
        raise DataError(
            f"{num_bad:,} of {counted(num_rows, 'line')} cannot be used. Fix or remove:\n" + "\n".join(problems) + more
        )
    if num_rows == num_undecided:
        reason = f" None of {counted(num_rows, 'vote')} prefers one answer." if num_rows else ""
        raise DataError(f"There are no examples in {', '.join(map(str, paths))}.{reason}")


def as_row(value: Any, place: str, wanted: type[T]) -> T:
    """Returns one line of a file as a row of the type `wanted`; raises `RowError` or `MessageError`."""
    return _row(value, place, wanted, {}, False, Counter())


def _is_undecided(value: Any) -> bool:
    """Whether a line is an arena vote that prefers neither answer."""
    return isinstance(value, dict) and {"vote", "answers", "models"} <= value.keys() and "chosen" not in value


def _row(
    value: Any, place: str, wanted: type[T], columns: Mapping[str, str], joins_turns: bool, changed: Counter[str]
) -> T:
    if isinstance(value, BadLine):
        raise RowError(f"is {value.reason}")
    if not isinstance(value, dict):
        raise RowError("is not a JSON object")
    for name, column in columns.items():
        if column not in value:
            raise RowError(f"{column}: is missing, which tuning.columns.{name} names")
        if name in value and name not in columns.values():
            raise RowError(f"{name}: is there, but tuning.columns.{name} = {column} takes its place; leave out one")
    value = {key: each for key, each in value.items() if key not in columns.values()} | {
        name: value[column] for name, column in columns.items()
    }
    try:
        found = dict(recognised(value))
    except NoShapeError as error:
        raise RowError(str(error)) from None
    for name in ("messages", "prompt", "completion", "chosen", "rejected"):
        if isinstance(turns := found.get(name), list) and all(isinstance(turn, dict) for turn in turns):
            turns = [with_tool_calls(turn, f"{name}[{number}].") for number, turn in enumerate(turns)]
            if "conversations" in value and name in ("messages", "prompt"):
                turns = _with_both_sides(turns, changed, ends_open=wanted is Prompt)
            found[name] = _joined(turns, changed) if joins_turns and name in ("messages", "prompt") else turns
    if found.get("tools") and all(isinstance(found.get(name) or "", str) for name in _PLAIN):
        raise RowError("tools: a plain text has no place for them; give the prompt and the answer as messages")
    reads = {Supervised: _supervised, Preference: _preference, Judged: _judged, Prompt: _prompt}
    row = reads[wanted](found, place)
    assert isinstance(row, wanted)
    return row


def _supervised(found: Mapping[str, Any], place: str) -> Supervised:
    if "messages" in found:
        messages = _conversation(found["messages"], "messages", ends_with=("assistant",))
        return Supervised(place, "", messages, _tools(found))
    if "chosen" in found:
        raise RowError("is a preference, with a chosen and a rejected answer; give the answer to learn as completion")
    if "completion" not in found:
        raise RowError("has a prompt, but no answer to learn (completion)")
    if found.get("label", True) == 0:
        raise RowError("label: is false, so the answer should not be learnt; remove the line")
    prompt, answer = found.get("prompt", ""), found["completion"]
    if isinstance(answer, str) and isinstance(prompt, str):
        if not answer.strip():
            raise RowError("completion: is empty")
        return Supervised(place, prompt, answer)
    before = _as_messages(prompt, "prompt", "user")
    after = _as_messages(answer, "completion", "assistant")
    joined = _conversation([*before, *after], "prompt + completion", ends_with=("assistant",))
    return Supervised(place, "", joined, _tools(found), learnt_from=len(before))


def _preference(found: Mapping[str, Any], place: str) -> Preference:
    if "chosen" not in found or "rejected" not in found:
        raise RowError("has no chosen and rejected answer")
    prompt, chosen, rejected = found.get("prompt", ""), found["chosen"], found["rejected"]
    if chosen == rejected:
        raise RowError("rejected: is the same as chosen")
    margin = found.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise RowError("margin: is not a number")
    if margin is not None and not math.isfinite(margin):
        raise RowError("margin: is not a finite number")
    if all(isinstance(part, str) for part in (prompt, chosen, rejected)):
        for name, part in (("chosen", chosen), ("rejected", rejected)):
            if not part.strip():
                raise RowError(f"{name}: is empty")
        return Preference(place, prompt, chosen, rejected, margin)
    before = _as_messages(prompt, "prompt", "user") if prompt else []
    answers = [_as_messages(part, name, "assistant") for name, part in (("chosen", chosen), ("rejected", rejected))]
    if not before or all(_said(answer[: len(before)]) == _said(before) for answer in answers):  # whole conversations
        shared = _shared(*answers)
        before, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        if not before:
            raise RowError("prompt: chosen and rejected begin differently, so they do not answer the same prompt")
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        _conversation([*before, *answer], name, ends_with=("assistant",))
    return Preference(place, tuple(before), tuple(answers[0]), tuple(answers[1]), margin, _tools(found))


def _judged(found: Mapping[str, Any], place: str) -> Judged:
    if "label" not in found:
        raise RowError("label: is missing; it is true for a desirable answer, else false")
    if (label := found["label"]) not in (0, 1):
        raise RowError(f"label: is {label!r}, not true or false")
    row = _supervised({**found, "label": True}, place)
    if isinstance(row.answer, str):
        return Judged(place, row.prompt, row.answer, bool(label), row.tools)
    return Judged(place, row.answer[: row.learnt_from], row.answer[row.learnt_from :], bool(label), row.tools)


def _prompt(found: Mapping[str, Any], place: str) -> Prompt:
    others = {name: value for name, value in found.items() if name not in ("prompt", "messages", "tools", "completion")}
    tools, known = _tools(found), found.get("completion")
    messages = found.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if messages and isinstance(last, dict) and last.get("role") == "assistant":
        known, messages = last, messages[:-1]
    if isinstance(known, list) and known:
        known = known[-1]
    known = known.get("content") if isinstance(known, dict) else known
    if known is not None and others.setdefault("reference", known) != known:
        raise RowError("reference: is there, but the answer of the line takes its place; leave out one")
    name, asked = ("messages", messages) if "messages" in found else ("prompt", found.get("prompt"))
    if asked is None:
        raise RowError("has no prompt")
    if name == "prompt" and isinstance(asked, str):
        if not asked.strip():
            raise RowError("prompt: is empty")
        return Prompt(place, asked, others)
    return Prompt(place, _conversation(asked, name, ends_with=("user", "tool")), others, tools)


def _with_both_sides(turns: list[Message], changed: Counter[str], *, ends_open: bool) -> list[Message]:
    """A conversation from its first question, and unless it `ends_open`, up to its last answer, if it has both."""
    roles = [turn.get("role") for turn in turns]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "developer")), 0)
    begin = roles.index("user") if "user" in roles else first
    end = len(turns) if ends_open else next((n for n in range(len(turns), 0, -1) if roles[n - 1] == "assistant"), 0)
    if end <= begin:
        return turns
    changed["Left out answers before the first question"] += begin > first
    changed["Left out questions after the last answer"] += end < len(turns)
    return [*turns[:first], *turns[begin:end]]


def _joined(turns: list[Message], changed: Counter[str]) -> list[Message]:
    """The messages, with the texts of neighbouring ones joined that differ in nothing else; tools answer one by one."""
    found: list[Message] = []
    for turn in turns:
        last = found[-1] if found else {}
        same = {**last, "content": None} == {**turn, "content": None} and turn.get("role") != "tool"
        if same and all(isinstance(each.get("content"), str) for each in (last, turn)):
            found[-1] = {**last, "content": f"{last['content']}\n\n{turn['content']}"}
        else:
            found.append(turn)
    changed["Joined neighbouring turns of one role"] += len(found) < len(turns)
    return found


def _conversation(messages: Any, name: str, *, ends_with: Sequence[str]) -> tuple[Message, ...]:
    """Checks the order of a conversation: system first, then user and assistant in turn, tools after their calls.

    Returns the messages; raises `MessageError` or `RowError` naming the field.
    """
    checked = check_messages(messages, name)
    before, has_calls = "", False
    for number, message in enumerate(checked):
        where, role = f"{name}[{number}]", message["role"]
        for key in LEARNT_KEYS & message.keys():
            if message[key] not in (0, 1, None):
                raise RowError(
                    f"{where}.{key}: is {message[key]!r}; it must be 1 or true (learn the answer), 0 or false"
                )
            if message[key] and role != "assistant":
                raise RowError(f"{where}.{key}: is {message[key]!r}, but only answers of the assistant are learnt")
        if not message_text(message).strip() and not message.get("tool_calls"):
            raise RowError(f"{where}.content: is empty")
        allowed = _FOLLOWS[before] | ({"tool"} if has_calls else set())
        if role not in allowed:
            hint = "; tuning.join_turns=true joins neighbouring turns of one role" if role == before else ""
            raise RowError(f"{where}.role: is {role}, but must be {' or '.join(sorted(allowed))}{hint}")
        before = "system" if role == "developer" else role
        has_calls = role == "assistant" and bool(message.get("tool_calls"))
    check_last(checked, name, ends_with)
    return checked


def is_learnt(message: Message) -> bool:
    """Whether the answer of a message is to be learnt, as ``weight`` and ``train`` say."""
    return all(message[key] in (True, None) for key in LEARNT_KEYS & message.keys())


_FOLLOWS = {
    "": {"system", "developer", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "tool": {"tool", "assistant"},
}


def _as_messages(turns: Any, name: str, role: str) -> list[Message]:
    if isinstance(turns, str):
        return [{"role": role, "content": turns}]
    if isinstance(turns, dict):
        return [turns]
    if not isinstance(turns, list):
        raise RowError(f"{name}: is neither a text nor a list of messages")
    return turns


def _shared(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Counts the leading messages that both share, up to a user's or tool's message, and fewer than either has."""
    most = min(len(first), len(second)) - 1
    shared = next((number for number in range(most) if first[number] != second[number]), most)
    while shared and not (isinstance(last := first[shared - 1], dict) and last.get("role") in ("user", "tool")):
        shared -= 1
    return shared


def _said(messages: Sequence[Any]) -> list[Any]:
    return [(message.get("role"), message.get("content")) for message in messages if isinstance(message, dict)]


def _tools(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = found.get("tools")
    if isinstance(tools, str):  # Parquet files often store them as JSON
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError:
            raise RowError("tools: is a text, but not valid JSON") from None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools: is not a list of objects")
    return tuple(tools)
