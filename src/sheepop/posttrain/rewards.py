"""Samples answers to prompts, and rewards them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sheepop.core.errors import TrainingError
from sheepop.core.facts import counted
from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.policy import repetition
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.messages import Message

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Answer:
    """A completion of a prompt, with the other keys of the prompt's line; `token_ids` are of prompt and completion.

    If the prompt is a conversation, `prompt` is its rendered text, and `asked` and `said` are the messages of both.
    """

    prompt: str
    completion: str
    token_ids: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    asked: Sequence[Message] = ()
    said: Sequence[Message] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that a program or a service gets."""
        messages = {"messages": {"prompt": list(self.asked), "completion": list(self.said)}} if self.asked else {}
        return {"prompt": self.prompt, "completion": self.completion, "fields": dict(self.fields), **messages}


class Reward(Protocol):
    """A source of rewards; higher is better. Inherit `close` if there is no process to end."""

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """Returns one finite number per answer, or None for one that it does not judge.

        Raises `TrainingError` naming the answer if it fails.
        """

    def close(self) -> None:
        """Ends its process, if it has one."""
        return


@dataclass(frozen=True, eq=False)
class Written:
    """N sampled answers with their rewards, those of one prompt next to each other.

    `rewards` are NaN for answers that nothing judges; `parts` are the rewards by source. `logprobs` are those of their
    tokens under the policy in the sampler. `advantages` are empty until a `RewardMethod` has computed them.
    """

    answers: list[Answer] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    is_finished: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float | None]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.answers)

    def learnt_from(self, advantages: Sequence[float | None], most: int | None = None) -> Written:
        """The answers whose advantage is not None, or the first `most` of them, with their advantages."""
        kept = [number for number, advantage in enumerate(advantages) if advantage is not None][:most]
        columns = {**vars(self), "advantages": advantages}.values()
        return Written(*([values[number] for number in kept] for values in columns))

    def and_more(self, others: Written) -> Written:
        """Concatenates these and other answers."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return Written(*(mine + theirs for mine, theirs in pairs))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that were sampled for each answer."""
        return [len(tokens) for tokens in self.logprobs]

    def rows(self) -> list[dict[str, Any]]:
        """Each answer with its rewards, as plain data."""
        judged = zip(self.answers, self.parts, self.rewards, strict=True)
        return [
            {"prompt": answer.prompt, "text": answer.completion}
            | ({"rewards": dict(part), "reward": reward} if part else {})
            for answer, part, reward in judged
        ]

    def metrics(self) -> dict[str, float]:
        """Means over the answers."""
        pairs = zip(self.answers, self.prompt_lengths, strict=True)
        sampled = [answer.token_ids[prompt:] for answer, prompt in pairs]
        judged = np.array(self.rewards)[np.isfinite(self.rewards)]
        found = {name: [value for part in self.parts if (value := part[name]) is not None] for name in self.parts[0]}
        by_source = {f"reward_of_{name}": float(np.mean(values)) for name, values in found.items() if values}
        return {
            **(by_source if len(found) > 1 else {}),
            **({"reward": float(np.mean(judged)), "reward_deviation": float(np.std(judged))} if len(judged) else {}),
            "length": float(np.mean(self.lengths)),
            "truncated": 1 - float(np.mean(self.is_finished)),
            "repetition": float(np.mean([repetition(token_ids) for token_ids in sampled])),
        }


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

    def answer(self, prompt: str, text: str, token_ids: Sequence[int]) -> Answer:
        """An answer with this text and its tokens; the tools are one more key of the line."""
        fields = {**self.fields, "tools": list(self.tools)} if self.tools else self.fields
        said = [{"role": "assistant", "content": text}] if self.messages else ()
        return Answer(prompt, text, [*self.token_ids, *token_ids], fields, self.messages, said)


@dataclass(frozen=True, eq=False)
class Writer:
    """Samples answers to prompts and rewards them, if there are `rewards`; several `ranks` share the work."""

    tokenizer: Tokenizer
    rewards: Mapping[str, tuple[float, Reward]]
    max_new_tokens: int
    temperature: float
    end_ids: Sequence[int] = ()
    max_batch_size: int = 128
    ranks: Ranks = ALONE
    may_miss: bool = False

    def __call__(self, model: Transformer, questions: Sequence[Question], count: int, seed: int) -> Written:
        """Returns `count` answers to each question; the seed of question i is derived from `seed` and i."""
        generator = Generator(
            model, self.tokenizer, end_ids=self.end_ids, max_batch_size=self.max_batch_size, ranks=self.ranks
        )
        settings = GenerationConfig(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, num_completions=count, top_p=1.0
        )
        configs = [settings.replace(seed=derive_seed(seed, "prompt", number)) for number in range(len(questions))]
        completions = generator.generate([question.token_ids for question in questions], configs)
        repeats = [question for question in questions for _ in range(count)]
        answers = [
            question.answer(done.prompt, done.text, done.token_ids)
            for question, done in zip(repeats, completions, strict=True)
        ]
        lengths = [len(question.token_ids) for question in repeats]
        finished = [done.finish_reason == "stop" for done in completions]
        parts = self.ranks.shared(len(repeats), lambda own: self._judged(answers[own.start : own.stop]))
        rewards = [self._total(part, answer) for part, answer in zip(parts, answers, strict=True)]
        if self.rewards and not np.isfinite(rewards).any():
            raise TrainingError(f"{' and '.join(self.rewards)} judged none of {counted(len(answers), 'answer')}")
        return Written(answers, lengths, finished, rewards, parts, [done.logprobs for done in completions])

    def _judged(self, answers: Sequence[Answer]) -> list[Mapping[str, float | None]]:
        """The rewards of every answer by source."""
        found = {name: reward(answers) if answers else [] for name, (_, reward) in self.rewards.items()}
        return [{name: values[number] for name, values in found.items()} for number in range(len(answers))]

    def _total(self, part: Mapping[str, float | None], answer: Answer) -> float:
        """The weighted sum of an answer's rewards; without any NaN, or `TrainingError` unless that `may_miss`."""
        weighted = [self.rewards[name][0] * value for name, value in part.items() if value is not None]
        if self.rewards and not weighted and not self.may_miss:
            raise TrainingError(
                f"{' and '.join(self.rewards)} gave None for {shown([answer], 0)}, which is not a finite number"
            )
        return sum(weighted) if weighted else math.nan


def checked(rewards: Sequence[Any], answers: Sequence[Answer], source: str) -> list[float | None]:
    """The rewards as numbers; raises `TrainingError` unless `source` gave each answer a finite number or None."""
    if len(rewards) != len(answers):
        raise TrainingError(f"{source} gave {len(rewards):,} rewards for {len(answers):,} answers")
    for number, found in enumerate(rewards):
        if found is not None and (not isinstance(found, bool | int | float) or not math.isfinite(found)):
            raise TrainingError(f"{source} gave {found!r} for {shown(answers, number)}, which is not a finite number")
    return [None if found is None else float(found) for found in rewards]


def shown(answers: Sequence[Answer], number: int) -> str:
    """Names an answer by its beginning."""
    if number >= len(answers):
        return "the last answer"
    text = answers[number].completion
    return f"the answer {text[:_SHOWN_CHARACTERS]!r}{'...' if len(text) > _SHOWN_CHARACTERS else ''}"
