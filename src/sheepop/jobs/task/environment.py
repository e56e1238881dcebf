"""Environments: classes of the user, whose objects answer what a policy says, turn by turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from sheepop.core.bounded import BoundedProcess, BoundedProcessError, TimeLimitError
from sheepop.core.errors import ConfigError, TrainingError
from sheepop.posttrain.conversations import Reply, State
from sheepop.tokenizer.messages import MessageError, check_messages

_CHILD = "sheepop.jobs.task.program_child"
_MEMORY_BYTES = 2**31


class Environment:
    """The class ``Environment`` of a Python file, run in a separate process with limits, an object a conversation.

    ``reset(row)`` begins a conversation and returns messages after the prompt, or None; with a parameter `seed` it gets
    a number to draw from. ``step(message)`` gets what the model said and returns messages, a reward or None, and
    whether the conversation is done. A text stands for one message of the tool that was called, or else of the user.
    A call has `seconds`, the process 2 GiB of memory, and no network if Linux allows that. An environment that fails,
    hangs or returns anything else raises `TrainingError`; if it `may_fail`, that conversation gets None.
    """

    def __init__(self, path: Path, seconds: float, *, may_fail: bool = False) -> None:
        self._path, self._seconds, self._may_fail = path, seconds, may_fail
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=seconds)
        # Linux ends the process together with the thread that started it, so this object has a thread for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    @classmethod
    def open(cls, path: str, seconds: float, *, may_fail: bool = False) -> Environment:
        """Opens the file and looks for the class; raises `ConfigError` if it is not there."""
        found = cls(Path(path), seconds, may_fail=may_fail)
        if not found._path.is_file():
            raise ConfigError(f"{path} does not exist, so there is no environment to converse with.")
        try:
            found._thread.submit(found._ask, [], []).result()
        except BoundedProcessError as error:
            raise ConfigError(f"The environment {path} cannot be loaded: {error}") from None
        return found

    def __call__(self, states: Sequence[State]) -> list[Reply | None]:
        """The replies to the last messages, or the first messages of conversations in which nothing was said."""
        replies: list[Reply | None] = []
        while len(replies) < len(states):
            found, failure = list[Any](), None
            try:
                self._thread.submit(self._ask, states[len(replies) :], found).result()
            except BoundedProcessError as error:
                failure = error
            for each in found:
                replies.append(self._reply(each, states[len(replies)]))
            if failure is not None:
                limit = f"took more than {self._seconds:g} s, its time limit (reward_seconds)"
                self._fail(limit if isinstance(failure, TimeLimitError) else f"failed: {failure}", states[len(replies)])
                replies.append(None)
        return replies

    def _ask(self, states: Sequence[State], found: list[Any]) -> None:
        """Adds to `found` what the environment returns; all that came before a failure stays there."""
        conversations = [{**state._asdict(), "said": list(state.said)} for state in states]
        request = {"program": str(self._path.resolve()), "conversations": conversations}
        with closing(self._process.request(request, self._seconds)) as answers:
            found.extend(answers)

    def _reply(self, found: Any, state: State) -> Reply | None:
        """Checks what the environment returned."""
        said, reward, is_done = found if state.said else (found, None, False)
        if isinstance(said, str):
            calls = state.said[-1].get("tool_calls") if state.said else None
            called = (
                {"role": "tool", "tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]} if calls else {}
            )
            said = [{"role": "user", **called, "content": said}]
        try:
            messages = check_messages(said or [], "messages", ("system", "user", "tool"))
            if reward is not None and not (isinstance(reward, bool | int | float) and math.isfinite(reward)):
                raise MessageError(f"the reward is {reward!r}, not a finite number")
            if state.said and not messages and not is_done:
                raise MessageError("there is no message to go on with, and the conversation is not done")
        except MessageError as error:
            self._fail(f"returned something else than it should: {error}", state)
            return None
        return Reply(messages, float(reward or 0), is_done)

    def _fail(self, problem: str, state: State) -> None:
        """Raises `TrainingError` unless conversations may fail."""
        if not self._may_fail:
            place = f"in step {len(state.said)}" if state.said else "in reset"
            raise TrainingError(
                f"The environment {self._path} {problem}; {place} of the row {str(dict(state.row))[:80]}"
            )

    def close(self) -> None:
        """Ends the process."""
        self._thread.submit(self._process.close).result()
        self._thread.shutdown()
