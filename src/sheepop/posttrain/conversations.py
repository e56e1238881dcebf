"""Conversations of a policy with an environment: who wrote which token, as the network reads them in inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.request import Completion
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.messages import Message

ReadAnswer = Callable[[Sequence[int], Sequence[int], Sequence[Mapping[str, Any]], int], Message]
"""From a prompt's and an answer's tokens, the tools and the number of calls so far to the message of the answer."""


class Reply(NamedTuple):
    """What an environment answers: messages, a reward, and whether the conversation is done."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    is_done: bool = False


class State(NamedTuple):
    """A conversation as an environment sees it: its number, the row and seed it begins with, and the model's messages.

    The environment's answer to the last message depends on nothing else.
    """

    number: int
    row: Mapping[str, Any]
    seed: int
    said: Sequence[Message]


Environment = Callable[[Sequence[State]], list[Reply | None]]
"""From conversations to the replies to their last messages, or their first messages if nothing was said yet.

None stands for one that has failed."""


@dataclass(frozen=True)
class Question:
    """A tokenised prompt, with the other keys of its line; a conversation has its messages and tools, too."""

    token_ids: list[int]
    fields: Mapping[str, Any]
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, token_ids: list[int], fields: Mapping[str, Any]) -> Question:
        """A prompt with these tokens and the fields of its `Group`."""
        given = {name: fields[name] for name in ("messages", "tools") if name in fields}
        return cls(token_ids, {name: value for name, value in fields.items() if name not in given}, **given)


class Transcript(NamedTuple):
    """The tokens of an answer and of what it answers; the policy has sampled those of the `spans`, and no others.

    They are one sequence from each of `starts` on. A template that renders earlier turns differently begins a new one,
    which contains the conversation so far as the policy then read it. `rewards` are those of the environment for each
    span, as far as it has replied.
    """

    token_ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    starts: Sequence[int] = (0,)
    rewards: Sequence[float] = ()

    @property
    def sampled(self) -> list[int]:
        """The tokens that the policy has sampled."""
        return [token_id for begin, end in self.spans for token_id in self.token_ids[begin:end]]


@dataclass(eq=False)
class Conversation:
    """A conversation while it goes on. `reward` sums those of the environment; None if it has failed.

    `rewards` are those after each answer. `is_finished` is false if the conversation was cut off.
    """

    question: Question
    state: State
    messages: list[Message]
    most_tokens: int
    said: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    prompt: str = ""
    text: str = ""
    reward: float | None = 0.0
    is_open: bool = True
    is_finished: bool = False

    @property
    def sequence(self) -> list[int]:
        """The tokens of the sequence that goes on."""
        return self.token_ids[self.starts[-1] :]

    def read(self, prompt: Sequence[int]) -> bool:
        """Takes the tokens before the next answer; returns whether there is room for one."""
        known = self.sequence
        new = prompt[len(known) :] if list(prompt[: len(known)]) == known else prompt
        if len(self.token_ids) + len(new) >= self.most_tokens:
            self.is_open = False
            return False
        if len(new) == len(prompt) and known:
            self.starts.append(len(self.token_ids))
        self.token_ids += new
        return True

    def write(self, answer: Completion) -> None:
        """Takes the tokens of an answer; one that was cut off ends the conversation."""
        self.prompt = self.prompt or answer.prompt
        self.spans.append((len(self.token_ids), len(self.token_ids) + len(answer.token_ids)))
        self.token_ids += answer.token_ids
        self.logprobs += answer.logprobs
        self.text, self.is_open = answer.text, answer.finish_reason == "stop"

    def say(self, message: Message) -> None:
        """Takes an answer as a message."""
        self.said.append(message)
        self.messages.append(message)

    def hear(self, reply: Reply | None) -> None:
        """Takes what the environment answers; None if it has failed."""
        if reply is None or self.reward is None:
            self.is_open, self.reward = False, None
            return
        self.messages += reply.messages
        self.reward += reply.reward
        self.rewards += [reply.reward] if self.spans else []
        self.is_open, self.is_finished = not reply.is_done, reply.is_done


@dataclass(frozen=True, eq=False)
class Conversing:
    """Lets a policy converse with an `environment`, in at most `max_turns` answers.

    Every answer follows the tokens that inference has there: the whole conversation, rendered by the `template`.
    """

    environment: Environment
    template: ChatTemplate
    read: ReadAnswer
    max_turns: int

    def __call__(
        self, generator: Generator, questions: Sequence[Question], count: int, settings: GenerationConfig, seed: int
    ) -> list[Conversation]:
        """`count` conversations about each question, those of one next to each other.

        One has at most ``settings.max_new_tokens`` tokens behind the tokens of its question: those of all answers, of
        the environment, and of what is rendered again. The environment's seed is the same for all of a question.
        """
        found = [
            Conversation(
                question,
                State(number, question.fields, derive_seed(seed, "environment", number // count), ()),
                list(question.messages),
                len(question.token_ids) + settings.max_new_tokens,
            )
            for number, question in enumerate(question for question in questions for _ in range(count))
        ]
        self._hear(generator, found)
        for turn in range(self.max_turns):
            going = [each for each in found if each.is_open and each.read(self._prompt(generator, each))]
            if not going:
                break
            answers = generator.generate(
                [each.sequence for each in going],
                [
                    settings.replace(
                        max_new_tokens=each.most_tokens - len(each.token_ids),
                        seed=derive_seed(seed, "turn", each.state.number, turn),
                    )
                    for each in going
                ],
            )
            for each, answer in zip(going, answers, strict=True):
                prompt = each.sequence
                each.write(answer)
                calls = sum(len(message.get("tool_calls") or ()) for message in each.messages)
                each.say(self.read(prompt, answer.token_ids, each.question.tools, calls))
            self._hear(generator, found)
        return found

    def _prompt(self, generator: Generator, each: Conversation) -> list[int]:
        tools = list(each.question.tools) or None
        return self.template.encode(generator.tokenizer, each.messages, tools=tools, add_generation_prompt=True)

    def _hear(self, generator: Generator, found: Sequence[Conversation]) -> None:
        """Passes the last messages of open conversations to the environment; every rank always has the same ones."""

        def replies(own: range) -> list[Any]:
            here = [number for number in own if found[number].is_open]
            heard = self.environment([found[number].state._replace(said=found[number].said) for number in here])
            by_number = dict(zip(here, heard, strict=True))
            return [by_number.get(number) for number in own]

        for each, reply in zip(found, generator.ranks.shared(len(found), replies), strict=True):
            if each.is_open:
                each.hear(None if reply is None else Reply(*reply))
