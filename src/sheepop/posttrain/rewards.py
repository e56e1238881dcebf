"""Samples answers to prompts, and rewards them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sheepop.core.errors import TrainingError
from sheepop.core.facts import counted
from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.conversations import Conversation, Conversing, Question, Transcript
from sheepop.posttrain.policy import repetition
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.messages import Message

_SHOWN_CHARACTERS = 80
_ENVIRONMENT = "environment"


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
    """A source of rewards; higher is better. Inherit `close` if there is no process to end.

    `failure` says why it did not judge an answer, the last time that it failed.
    """

    failure: str = ""

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

    `rewards` are NaN for answers that nothing judges; `parts` are the rewards by source. `logprobs` are those of the
    sampled tokens under the policy in the sampler. `advantages` are empty until a `RewardMethod` has computed them.
    """

    answers: list[Answer] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)
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

    def log_probabilities(self, mask: Tensor) -> Tensor:
        """`logprobs` at the places (N, T) of their tokens, which the mask has; 0 elsewhere."""
        values = torch.tensor(list(chain(*self.logprobs)))
        return torch.zeros(mask.shape).masked_scatter(mask, values)

    def metrics(self) -> dict[str, float]:
        """Means over the answers."""
        judged = np.array(self.rewards)[np.isfinite(self.rewards)]
        found = {name: [value for part in self.parts if (value := part[name]) is not None] for name in self.parts[0]}
        by_source = {f"reward_of_{name}": float(np.mean(values)) for name, values in found.items() if values}
        by_source |= {f"missing_of_{n}": 1 - len(v) / len(self) for n, v in found.items() if len(v) < len(self)}
        turns = {"turns": float(np.mean([len(each.spans) for each in self.transcripts]))}
        return {
            **(by_source if len(found) > 1 else {}),
            **(turns if _ENVIRONMENT in found else {}),
            **({"reward": float(np.mean(judged)), "reward_deviation": float(np.std(judged))} if len(judged) else {}),
            "length": float(np.mean(self.lengths)),
            "truncated": 1 - float(np.mean(self.is_finished)),
            "repetition": float(np.mean([repetition(transcript.sampled) for transcript in self.transcripts])),
        }


@dataclass(eq=False)
class Writer:
    """Samples answers to prompts and rewards them, if there are `rewards`; several `ranks` share the work.

    With `conversing`, an answer is a conversation with an environment, whose rewards count as those of one more source.
    One process keeps its engine for the next call with the same model.
    """

    tokenizer: Tokenizer
    rewards: Mapping[str, tuple[float, Reward]]
    max_new_tokens: int
    temperature: float
    end_ids: Sequence[int] = ()
    max_batch_size: int = 128
    ranks: Ranks = ALONE
    may_miss: bool = False
    conversing: Conversing | None = None
    _generator: tuple[Transformer, Generator] | None = None

    def __call__(self, model: Transformer, questions: Sequence[Question], count: int, seed: int) -> Written:
        """Returns `count` answers to each question; the seed of question i is derived from `seed` and i."""
        generator = self._generator_of(model)
        settings = GenerationConfig(max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=1.0)
        if self.conversing is not None:
            return self._rewarded(*_spoken(self.conversing(generator, questions, count, settings, seed)))
        settings = settings.replace(num_completions=count)
        configs = [settings.replace(seed=derive_seed(seed, "prompt", number)) for number in range(len(questions))]
        completions = generator.generate([question.token_ids for question in questions], configs)
        repeats = [question for question in questions for _ in range(count)]
        answers = [
            answered(question, done.prompt, done.text, done.token_ids)
            for question, done in zip(repeats, completions, strict=True)
        ]
        spans = [(len(asked.token_ids), len(said.token_ids)) for asked, said in zip(repeats, answers, strict=True)]
        transcripts = [Transcript(answer.token_ids, [span]) for answer, span in zip(answers, spans, strict=True)]
        finished = [done.finish_reason == "stop" for done in completions]
        return self._rewarded(answers, transcripts, finished, [done.logprobs for done in completions])

    def _generator_of(self, model: Transformer) -> Generator:
        """The generator of `model`; that of several ranks is not kept, since between calls they have pieces of it."""
        kept = self._generator
        if kept is None or kept[0] is not model:
            settings: dict[str, Any] = {"max_batch_size": self.max_batch_size, "ranks": self.ranks}
            kept = model, Generator(model, self.tokenizer, end_ids=self.end_ids, **settings)
        self._generator = None if self.ranks.are_several else kept
        return kept[1]

    def _rewarded(
        self,
        answers: list[Answer],
        transcripts: list[Transcript],
        finished: list[bool],
        logprobs: list[list[float]],
        heard: Sequence[float | None] | None = None,
    ) -> Written:
        """The answers with their rewards; `heard` are those of an environment, None where it has failed."""
        parts = self.ranks.shared(len(answers), lambda own: self._judged(answers[own.start : own.stop]))
        if heard is not None:
            parts = [{**part, _ENVIRONMENT: reward} for part, reward in zip(parts, heard, strict=True)]
        rewards = [
            math.nan if part.get(_ENVIRONMENT, 0) is None else self._total(part, answer)
            for part, answer in zip(parts, answers, strict=True)
        ]
        if self._weights and not np.isfinite(rewards).any():
            failures = [f". {reward.failure}" for _, reward in self.rewards.values() if reward.failure]
            judges = " and ".join(self._weights)
            raise TrainingError(f"{judges} judged none of {counted(len(answers), 'answer')}{''.join(failures)}")
        return Written(answers, transcripts, finished, rewards, parts, logprobs)

    def _judged(self, answers: Sequence[Answer]) -> list[dict[str, float | None]]:
        """The rewards of every answer by source."""
        found = {name: reward(answers) if answers else [] for name, (_, reward) in self.rewards.items()}
        return [{name: values[number] for name, values in found.items()} for number in range(len(answers))]

    @property
    def _weights(self) -> dict[str, float]:
        """The weights of all sources of rewards by their names."""
        own = {name: weight for name, (weight, _) in self.rewards.items()}
        return own if self.conversing is None else {**own, _ENVIRONMENT: 1.0}

    def _total(self, part: Mapping[str, float | None], answer: Answer) -> float:
        """The weighted sum of an answer's rewards; without any NaN, or `TrainingError` unless that `may_miss`."""
        weighted = [self._weights[name] * value for name, value in part.items() if value is not None]
        if self._weights and not weighted and not self.may_miss:
            raise TrainingError(
                f"{' and '.join(self._weights)} gave None for {shown([answer], 0)}, which is not a finite number"
            )
        return sum(weighted) if weighted else math.nan


def answered(question: Question, prompt: str, text: str, token_ids: Sequence[int]) -> Answer:
    """An answer with this text and its tokens; the tools are one more key of the line."""
    fields = {**question.fields, "tools": list(question.tools)} if question.tools else question.fields
    said = [{"role": "assistant", "content": text}] if question.messages else ()
    return Answer(prompt, text, [*question.token_ids, *token_ids], fields, question.messages, said)


def _spoken(conversations: Sequence[Conversation]) -> tuple[Any, ...]:
    """The arguments of `Writer._rewarded` for conversations."""
    answers = []
    for each in conversations:
        question, num_asked = each.question, len(each.question.messages)
        answer = answered(question, each.prompt, each.text, ())
        answers.append(replace(answer, token_ids=each.sequence, said=each.messages[num_asked:]))
    transcripts = [Transcript(each.token_ids, each.spans, each.starts, each.rewards) for each in conversations]
    finished, logprobs = [each.is_finished for each in conversations], [each.logprobs for each in conversations]
    return answers, transcripts, finished, logprobs, [each.reward for each in conversations]


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
