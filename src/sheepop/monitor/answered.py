"""The answers of a log with the votes on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sheepop.serve.conversation_log import LogFaults, Logged, read_log
from sheepop.tokenizer.messages import Message, message_text


@dataclass(frozen=True)
class Answered:
    """An answer to a prompt: a text, or a message after a conversation; `votes` is the sum of the votes on it, and
    `comments` are those of the voters.

    `id` and `choice` name it in the log. `time` is in ISO 8601. `reason` is the finish reason of a whole answer, or
    None; `ended` is "whole", "left", or the code of an error. `mean_logprob` is the mean natural log-probability of its
    tokens under the model, None if there are none.
    """

    place: str
    id: str
    choice: int
    time: str
    model: str
    prompt: str | tuple[Message, ...]
    answer: str | Message
    reason: str | None
    ended: str
    prompt_tokens: int
    tokens: int
    mean_logprob: float | None
    first_token_seconds: float
    seconds: float
    tools: tuple[Message, ...] = ()
    num_votes: int = 0
    votes: int = 0
    comments: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """The text of the prompt, or of the last message of the conversation."""
        if isinstance(self.prompt, str):
            return self.prompt
        return message_text(self.prompt[-1]) if self.prompt else ""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.answer if isinstance(self.answer, str) else message_text(self.answer)

    @property
    def name(self) -> tuple[str, int]:
        """The id and the number of the answer, which are together unique in a log."""
        return self.id, self.choice


_ANSWERED = TypeAdapter(Answered)


def read_answers(directory: str | Path, faults: LogFaults) -> Iterator[Answered]:
    """Yields the answers of a log in its order, with their votes; counts `faults`. Raises as `read_log` does."""
    counts, sums = Counter[tuple[str, str]](), defaultdict[tuple[str, str], int](int)
    comments = defaultdict[tuple[str, str], list[str]](list)
    for logged in read_log(directory, LogFaults()):
        record = logged.record
        if record.get("kind") == "vote" and record.get("vote") in (1, -1):
            key = str(record.get("id")), str(record.get("choice"))
            counts[key] += 1
            sums[key] += record["vote"]
            if comment := record.get("comment"):
                comments[key].append(_well_formed(str(comment)))
    for logged in read_log(directory, faults):
        if logged.record.get("kind") == "vote":
            continue
        try:
            found = list(_answers(logged))
        except (KeyError, TypeError, ValidationError):
            faults.unknown += 1
            continue
        for answer in found:
            key = answer.id, str(answer.choice)
            yield replace(answer, num_votes=counts[key], votes=sums[key], comments=tuple(comments[key]))


def _answers(logged: Logged) -> Iterator[Answered]:
    """The answers of a record; raises if it lacks a key or has another type in one."""
    record = _well_formed(logged.record)
    for answer in record["answers"]:
        own = {
            "place": logged.place,
            "prompt": record["prompt"] if "prompt" in record else record["messages"],
            "answer": answer["text"] if "text" in answer else answer["message"],
            "reason": answer["finish_reason"],
        }
        yield _ANSWERED.validate_python({**record, **answer, **own})


def _well_formed(value: Any) -> Any:
    """JSON whose strings have a replacement character for each half of a surrogate pair, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: _well_formed(each) for key, each in value.items()}
    return [_well_formed(each) for each in value] if isinstance(value, list) else value
