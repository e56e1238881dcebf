"""Recognises conversations in records and turns them into plain text.

Each turn is a line with the role and a colon, followed by its text; an empty line separates turns::

    user:
    How much is 2 + 2?

    assistant:
    4
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TURN_FIELDS = ("messages", "conversations", "conversation")
_ANSWERS = ("response", "completion", "chosen")
_PAIRS = (("instruction", "output"), ("question", "answer"))
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}


def chat_text(record: Mapping[str, Any]) -> str | None:
    """Returns the conversation in `record` as text, or None if it has no known form.

    Known forms are turns in one of `_TURN_FIELDS`; ``prompt`` with one of `_ANSWERS` (a rejected answer is left out);
    ``instruction`` with ``output`` and perhaps ``input``; ``question`` with ``answer``. A ``system`` text comes first.
    """
    for field in _TURN_FIELDS:
        if field in record and (text := turns_text(record[field])) is not None:
            return text
    turns = _pair(record)
    if turns is None:
        return None
    system = record.get("system")
    return _joined([("system", system), *turns] if isinstance(system, str) and system else turns)


def turns_text(turns: object) -> str | None:
    """Returns a list of ``{role, content}`` or ``{from, value}`` records as text, or None if it is something else."""
    known = _turns(turns)
    return None if known is None else _joined(known)


def _pair(record: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    if record.get("prompt") is not None:
        prompt = _turns(record["prompt"], "user")
        answer = _turns(next((record[field] for field in _ANSWERS if field in record), None), "assistant")
        if prompt is None or answer is None:
            return None
        # Preference data often repeats the whole conversation in the answer.
        return answer if answer[: len(prompt)] == prompt else prompt + answer
    if "rejected" in record and "chosen" in record:
        return _turns(record["chosen"])
    for question_field, answer_field in _PAIRS:
        texts: list[Any] = [record.get(question_field), record.get(answer_field)]
        if all(isinstance(text, str) for text in texts):
            more = record.get("input")
            if question_field == "instruction" and isinstance(more, str) and more:
                texts[0] = f"{texts[0]}\n\n{more}"
            return list(zip(("user", "assistant"), texts, strict=True))
    return None


def _turns(value: object, speaker: str = "") -> list[tuple[str, str]] | None:
    """Returns the turns of a list of records; a string is one turn of the `speaker`, if one is given."""
    if isinstance(value, str) and speaker:
        return [(speaker, value)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return None
    known = [turn for turn in map(_turn, value) if turn is not None]
    return known if len(known) == len(value) else None


def _turn(turn: object) -> tuple[str, str] | None:
    if not isinstance(turn, Mapping):
        return None
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or not ("content" in turn or "value" in turn or "tool_calls" in turn):
        return None
    content = turn["content"] if "content" in turn else turn.get("value")
    parts = [part for part in (_content_text(content), _as_json(turn.get("tool_calls"))) if part]
    return _ROLES.get(role.lower(), role.lower()), "\n".join(parts)


def _content_text(content: object) -> str:
    """Returns the text of a turn; for a list of parts their texts, and the type in brackets of other parts."""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return content if isinstance(content, str) else _as_json(content)


def _part(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"[{part.get('type', 'part')}]" if isinstance(part, Mapping) else _content_text(part)


def _as_json(value: object) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _joined(turns: Sequence[tuple[str, str]]) -> str:
    if not any(text for _, text in turns):
        return ""
    return "\n\n".join(f"{role}:\n{text}" for role, text in turns)
