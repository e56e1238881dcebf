"""The answers of a log with the votes on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sheepop.monitor.log import LogFaults, read_log
from sheepop.tokenizer.messages import Message, message_text


@dataclass(frozen=True)
class Answered:
    """An answer to a prompt: a text, or a message after a conversation; `votes` is the sum of the votes on it.

    `reason` is the finish reason of a whole answer, or None; `ended` is "whole", "left", or the code of an error.
    `mean_logprob` is the mean natural log-probability of its tokens under the model, None if there are none.
    """

    place: str
    model: str
    prompt: str | tuple[Message, ...]
    tools: tuple[Message, ...]
    answer: str | Message
    reason: str | None
    ended: str
    prompt_tokens: int
    tokens: int
    mean_logprob: float | None
    first_token_seconds: float
    seconds: float
    num_votes: int = 0
    votes: int = 0

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


def read_answers(directory: str | Path, faults: LogFaults) -> Iterator[Answered]:
    """Yields the answers of a log in its order, with their votes; counts `faults`. Raises as `read_log` does."""
    counts, sums = Counter[tuple[str, int]](), defaultdict[tuple[str, int], int](int)
    for logged in read_log(directory, LogFaults()):
        if logged.record["kind"] == "vote":
            key = logged.record["id"], logged.record["choice"]
            counts[key] += 1
            sums[key] += logged.record["vote"]
    for logged in read_log(directory, faults):
        record = logged.record
        for answer in record.get("answers", ()):
            key = record["id"], answer["choice"]
            yield Answered(
                logged.place,
                record["model"],
                record["prompt"] if "prompt" in record else tuple(record["messages"]),
                tuple(record.get("tools", ())),
                answer["text"] if "text" in answer else answer["message"],
                answer["finish_reason"],
                record["ended"],
                record["prompt_tokens"],
                answer["tokens"],
                answer["mean_logprob"],
                record["first_token_seconds"],
                record["seconds"],
                counts[key],
                sums[key],
            )
