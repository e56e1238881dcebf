"""Recognises the shapes of published datasets by their keys and converts them to the plain shapes.

The plain shapes are ``messages``, ``prompt`` with ``completion``, and ``prompt`` with ``chosen`` and ``rejected``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

Fields = Mapping[str, Any]
_CALLS = ("function_call", "tool_call")
# Senders of ShareGPT by their roles, in small letters and with underscores.
_SHAREGPT_ROLES = {
    sender: role
    for role, senders in {
        "user": ("human", "user"),
        "assistant": ("gpt", "chatgpt", "assistant", "bot", "model", *_CALLS),
        "system": ("system",),
        "tool": ("tool", "function", "observation", "function_response", "tool_response"),
    }.items()
    for sender in senders
}
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


class NoShapeError(Exception):
    """An object has no known shape, or values that do not fit its shape."""


class Shape(NamedTuple):
    """A shape: its required keys, and the conversion of an object to a plain shape."""

    name: str
    keys: set[str]
    convert: Callable[[Fields], Fields] = dict


def recognised(fields: Fields) -> Fields:
    """Converts `fields` to a plain shape; raises `NoShapeError` naming their keys and the known shapes."""
    present = {key for key, value in fields.items() if value is not None}
    for shape in SHAPES:
        if shape.keys <= present:
            return _with_context(shape.convert(fields))
    known = "; ".join(f"{shape.name}: {', '.join(sorted(shape.keys))}" for shape in SHAPES)
    raise NoShapeError(f"has the keys {', '.join(sorted(fields)) or 'none'}, which fit no known shape ({known})")


def _sharegpt(fields: Fields) -> Fields:
    turns = fields["conversations"]
    if not isinstance(turns, list):
        raise NoShapeError("conversations: is not a list")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise NoShapeError(f"conversations[{number}]: is not an object")
        if "role" in turn:
            messages.append(turn)
            continue
        sender = str(turn.get("from")).lower().replace("-", "_")
        role = _SHAREGPT_ROLES.get(sender)
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise NoShapeError(f"conversations[{number}].from: is {turn.get('from')!r}, not one of {known}")
        message = {**_rest(turn, "from", "value"), "role": role, "content": turn.get("value")}
        messages.append(_call(message, f"conversations[{number}].value") if sender in _CALLS else message)
    return {**_rest(fields, "conversations"), "messages": messages}


def _call(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message whose content is a call, or a list of calls, as JSON text."""
    try:
        found = json.loads(message["content"])
    except (TypeError, ValueError, RecursionError):
        raise NoShapeError(f"{where}: is not a call as JSON text") from None
    calls = found if isinstance(found, list) else [found]
    return {**message, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _with_context(fields: Fields) -> Fields:
    """A plain shape with the turns of ``system`` and ``history`` before it, as messages.

    ``history`` are earlier messages, or pairs of what the user and the assistant said. As these, an answer is learnt if
    the row is a conversation.
    """
    system, history = fields.get("system"), fields.get("history")
    if not system and not history:
        return _rest(fields, "system", "history")
    if not isinstance(system or "", str):
        raise NoShapeError("system: is not a text")
    before: list[Any] = [{"role": "system", "content": system}] if system and system.strip() else []
    for number, turn in enumerate(_listed(history or [], "history")):
        if isinstance(turn, list) and len(turn) == 2 and all(isinstance(said, str) for said in turn):
            before += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        elif isinstance(turn, dict):
            before.append(turn)
        else:
            raise NoShapeError(f"history[{number}]: is neither a message nor a pair of texts")
    rest = _rest(fields, "system", "history")
    if "messages" in rest:
        return {**rest, "messages": _after(before, rest["messages"], "messages")}
    if rest.get("prompt"):
        prompt = rest["prompt"]
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {**rest, "prompt": _after(before, said, "prompt")}
    return {**rest, **{name: _after(before, rest[name], name) for name in ("chosen", "rejected") if name in rest}}


def _after(before: list[Any], turns: Any, name: str) -> list[Any]:
    """Messages after those of the context; only one of them has a system message."""
    found = [turns] if isinstance(turns, dict) else _listed(turns, name)
    if before and found and isinstance(found[0], dict) and found[0].get("role") == "system" == before[0].get("role"):
        raise NoShapeError(f"system: {name} begin with a message of the system, too; remove one of them")
    return [*before, *found]


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise NoShapeError(f"{name}: is not a list")
    return value


def _instruction(answer: str, context: str) -> Callable[[Fields], Fields]:
    """Converts Alpaca and Dolly: an instruction, an optional context, and the answer."""

    def convert(fields: Fields) -> Fields:
        parts = {"instruction": fields["instruction"], context: fields.get(context) or ""}
        for name, part in parts.items():
            if not isinstance(part, str):
                raise NoShapeError(f"{name}: is not a text")
        question = "\n\n".join(part for part in parts.values() if part.strip())
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": fields[answer]}]
        return {**_rest(fields, "instruction", context, answer), "messages": messages}

    return convert


def _asked(question: str, answer: str) -> Callable[[Fields], Fields]:
    """Converts a question with its answer, which stay beside the conversation for rewards to read."""

    def convert(fields: Fields) -> Fields:
        asked, said = {"role": "user", "content": fields[question]}, {"role": "assistant", "content": fields[answer]}
        return {**fields, "messages": [asked, said]}

    return convert


def _plain(prompt: str, answer: str) -> Callable[[Fields], Fields]:
    """Converts a plain text with what stands before it, if anything does."""
    names = {"prompt": prompt, "completion": answer}
    return lambda fields: _rest(fields, *names.values()) | {to: fields.get(name, "") for to, name in names.items()}


def _hh(fields: Fields) -> Fields:
    """Converts Anthropic's HH: both answers as one text each, with the whole dialogue before them."""
    if "prompt" not in fields and fields.get("question"):
        fields = {**_rest(fields, "question"), "prompt": fields["question"]}
    texts = fields["chosen"], fields["rejected"]
    if not all(isinstance(text, str) and text.startswith(_HUMAN) for text in texts) or "prompt" in fields:
        return _scored(fields)
    dialogues = [_dialogue(text) for text in texts]
    return {**_rest(fields, "chosen", "rejected"), "chosen": dialogues[0], "rejected": dialogues[1]}


def _dialogue(text: str) -> list[Fields]:
    messages: list[Fields] = []
    for part in text.split(_HUMAN)[1:]:
        question, *answers = part.split(_ASSISTANT)
        messages.append({"role": "user", "content": question.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


def _scored(fields: Fields) -> Fields:
    """Takes the difference of the answers' scores, if they have any, as the margin of a preference."""
    scores = fields.get("score_chosen"), fields.get("score_rejected")
    if fields.get("margin") is None and all(isinstance(score, int | float) for score in scores):
        return {**fields, "margin": scores[0] - scores[1]}  # type: ignore[operator]
    return fields


def _ranked(answers: str, score: str) -> Callable[[Fields], Fields]:
    """Converts answers with scores: chooses the best and rejects the worst, as UltraFeedback's binarized form does."""

    def convert(fields: Fields) -> Fields:
        entries = fields[answers]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise NoShapeError(f"{answers}: is not a list of objects")
        found = []
        for number, entry in enumerate(entries):
            value = entry.get(score)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise NoShapeError(f"{answers}[{number}].{score}: is not a number")
            found.append((value, entry.get("response")))
        if len({value for value, _ in found}) < 2:
            raise NoShapeError(f"{answers}: needs two answers with different scores")
        best, worst = max(found, key=itemgetter(0)), min(found, key=itemgetter(0))
        return {
            "prompt": fields["instruction"], "chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0],
        }  # fmt: skip

    return convert


def _numbered(key: str, sign: int) -> Callable[[Fields], Fields]:
    """Converts answers with a list of scores (`sign` 1) or of ranks, where the lowest is best (`sign` -1)."""

    def convert(fields: Fields) -> Fields:
        answers, values = fields["completions"], fields[key]
        if not isinstance(answers, list) or not isinstance(values, list) or len(answers) != len(values):
            raise NoShapeError(f"completions and {key}: are not two lists of one length")
        entries = [
            {"response": answer, "score": sign * value if isinstance(value, int | float) else value}
            for answer, value in zip(answers, values, strict=True)
        ]
        return _ranked("completions", "score")({"instruction": fields["prompt"], "completions": entries})

    return convert


def _rest(fields: Fields, *taken: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in taken}


# The first shape whose keys are all present is taken.
SHAPES = (
    Shape("ranked answers", {"prompt", "completions", "scores"}, _numbered("scores", 1)),
    Shape("ranked answers by place", {"prompt", "completions", "ranks"}, _numbered("ranks", -1)),
    Shape("UltraFeedback", {"instruction", "completions"}, _ranked("completions", "overall_score")),
    Shape("preference, also Anthropic's HH", {"chosen", "rejected"}, _hh),
    Shape("ShareGPT", {"conversations"}, _sharegpt),
    Shape("conversation", {"messages"}),
    Shape("Dolly", {"instruction", "response"}, _instruction("response", "context")),
    Shape("Alpaca", {"instruction", "output"}, _instruction("output", "input")),
    Shape("FLAN", {"inputs", "targets"}, _plain("inputs", "targets")),
    Shape("prompt and completion, also with a label", {"prompt", "completion"}),
    Shape("prompt", {"prompt"}),
    Shape("question and answer", {"question", "answer"}, _asked("question", "answer")),
    Shape("problem and solution", {"problem", "solution"}, _asked("problem", "solution")),
    Shape("text", {"text"}, _plain("", "text")),
)
