"""Samples answers to prompts, and rewards them by a reward model, a Python program of the user, or an HTTP service."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import LoadedModel, load_model
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, TimeLimitError
from sheepop.core.errors import ConfigError, DataError, TrainingError, UsageError
from sheepop.core.facts import counted
from sheepop.core.http_client import HttpClient
from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.conversations import Conversation, Conversing, Question, Transcript
from sheepop.posttrain.policy import repetition
from sheepop.posttrain.preference import answer_rewards
from sheepop.tokenizer import Tokenizer

_CHILD = "sheepop.posttrain.reward_child"
_MEMORY_BYTES = 2**31
_SHOWN_CHARACTERS = 80
_ATTEMPTS = 5
_ENVIRONMENT = "environment"
_EXPECTED = 'Give the address of a service that replies {"rewards": [...]} to {"answers": [...]}.'


@dataclass(frozen=True)
class Answer:
    """A completion of a prompt, with the other keys of the prompt's line; `token_ids` are of prompt and completion."""

    prompt: str
    completion: str
    token_ids: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that a program or a service gets."""
        return {"prompt": self.prompt, "completion": self.completion, "fields": dict(self.fields)}


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
class ModelReward(Reward):
    """A reward model with the tokenizer of the policy."""

    model: LoadedModel
    batch_size: int

    @classmethod
    def fitting(cls, loaded: LoadedModel, tokenizer: Tokenizer, batch_size: int) -> ModelReward:
        """Checks a loaded model; raises `ConfigError` if it is no reward model or has another tokenizer."""
        if not hasattr(loaded.model, REWARD_HEAD):
            raise ConfigError(f"{loaded.directory} is no reward model. Make one with: sheepop tune reward")
        if loaded.tokenizer.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(
                f"The reward model in {loaded.directory} has another tokenizer than the policy, so it cannot read its "
                "answers. Train it from the same model."
            )
        return cls(loaded, batch_size)

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The outputs of the scalar head at the last tokens."""
        rows, loaded = [list(answer.token_ids) for answer in answers], self.model
        if (longest := max(map(len, rows), default=0)) > (most := loaded.config.max_seq_len):
            raise TrainingError(
                f"The reward model reads {most:,} tokens, but an answer with its prompt has {longest:,}."
            )
        found = answer_rewards(loaded.model, rows, batch_size=self.batch_size, pad_id=loaded.tokenizer.filler_id)
        return _checked(found.tolist(), answers, str(loaded.directory))


class ProgramReward(Reward):
    """The function ``reward`` of a Python file, run in a separate process with limits.

    It gets answers one by one, or all at once if it has a parameter `prompts`. It has `seconds` for each answer, 2 GiB
    of memory, and no network if Linux allows that. If it `may_fail`, answers for which it fails get None.
    """

    def __init__(self, path: Path, seconds: float, *, may_fail: bool = False) -> None:
        self._path, self._seconds, self._may_fail = path, seconds, may_fail
        self._takes_all: bool | None = None
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=seconds)
        # Linux ends the process together with the thread that started it, so this object has a thread for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The return values of the function."""
        found: list[Any] = []
        while True:
            try:
                if self._takes_all is None:
                    (self._takes_all,) = self._thread.submit(self._ask, (), []).result()
                if len(found) < len(answers):
                    self._thread.submit(self._ask, answers[len(found) :], found).result()
                return _checked(found, answers, str(self._path))
            except BoundedProcessError as error:
                if not (self._may_fail and answers):
                    raise self._failure(error, answers, len(found)) from None
                found += [None] * (len(answers) - len(found) if self._takes_all else 1)

    def _ask(self, answers: Sequence[Answer], found: list[Any]) -> list[Any]:
        request = {"program": str(self._path.resolve()), "answers": [answer.to_dict() for answer in answers]}
        seconds = self._seconds * len(answers) if answers and self._takes_all else self._seconds
        with closing(self._process.request(request, seconds)) as replies:
            found.extend(replies)
        return found

    def _failure(self, error: BoundedProcessError, answers: Sequence[Answer], number: int) -> TrainingError:
        where = counted(len(answers), "answer") if self._takes_all else _shown(answers, number)
        problem = f"{'failed for' if isinstance(error, HandlerError) else 'ended at'} {where}: {error}"
        if isinstance(error, TimeLimitError):
            each = " each" if self._takes_all else ""
            problem = f"took more than {self._seconds:g} s{each} for {where}. Fix it, or give it more time."
        return TrainingError(f"The reward program {self._path} {problem}")

    def close(self) -> None:
        """Ends the process."""
        self._thread.submit(self._process.close).result()
        self._thread.shutdown()


class EndpointReward(Reward):
    """A service that gets ``{"answers": [...]}`` by POST, with objects of `Answer.to_dict`, and replies
    ``{"rewards": [...]}``. It has `seconds` for each answer. If it `may_fail`, answers that it cannot judge get None.
    """

    def __init__(self, url: str, seconds: float, *, may_fail: bool = False) -> None:
        self._client, self._url, self._seconds = HttpClient(url, expected=_EXPECTED), url, seconds
        self._may_fail = may_fail

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The rewards in the reply. A request without answers, which only tests the service, is not repeated."""
        try:
            rewards = self._client.request(
                "",
                {"answers": [answer.to_dict() for answer in answers]},
                lambda reply: reply.get("rewards"),
                timeout=self._seconds * max(1, len(answers)),
                attempts=_ATTEMPTS if answers else 1,
            )
        except DataError as error:
            if self._may_fail and answers:
                return [None] * len(answers)
            raise TrainingError(f"Answers cannot be judged: {error}") from None
        if not isinstance(rewards, list):
            raise TrainingError(f'{self._url} did not reply with an object {{"rewards": [...]}}')
        return _checked(rewards, answers, self._url)


def open_reward(
    place: str, seconds: float, tokenizer: Tokenizer, *, device: str, batch_size: int, may_fail: bool = False
) -> Reward:
    """Opens a source of rewards (a URL, a Python file, or a reward model or its name) and tests it with an empty list.

    `seconds` is the time limit per answer of the first two; if they `may_fail`, answers for which they do get None.
    Raises `ConfigError` if it does not work.
    """
    reward: Reward
    if place.startswith(("http://", "https://")):
        try:
            reward = EndpointReward(place, seconds, may_fail=may_fail)
        except UsageError as error:
            raise ConfigError(str(error)) from None
    elif not Path(place).exists() and (place.endswith(".py") or PublishedName.parse(place) is None):
        raise ConfigError(f"{place} does not exist, so it cannot judge answers.")
    elif place.endswith(".py"):
        reward = ProgramReward(Path(place), seconds, may_fail=may_fail)
    else:
        reward = ModelReward.fitting(load_model(place, device, torch.float32), tokenizer, batch_size)
    try:
        reward([])
    except TrainingError as error:
        raise ConfigError(str(error)) from None
    return reward


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

    def log_probabilities(self, mask: Tensor) -> Tensor:
        """`logprobs` at the places (N, T) of their tokens, which the mask has; 0 elsewhere."""
        values = torch.tensor(list(chain(*self.logprobs)))
        return torch.zeros(mask.shape).masked_scatter(mask, values)

    def metrics(self) -> dict[str, float]:
        """Means over the answers."""
        judged = np.array(self.rewards)[np.isfinite(self.rewards)]
        found = {name: [value for part in self.parts if (value := part[name]) is not None] for name in self.parts[0]}
        by_source = {f"reward_of_{name}": float(np.mean(values)) for name, values in found.items() if values}
        turns = {"turns": float(np.mean([len(each.spans) for each in self.transcripts]))}
        return {
            **(by_source if len(found) > 1 else {}),
            **(turns if _ENVIRONMENT in found else {}),
            "reward": float(np.mean(judged)),
            "reward_deviation": float(np.std(judged)),
            "length": float(np.mean(self.lengths)),
            "truncated": 1 - float(np.mean(self.is_finished)),
            "repetition": float(np.mean([repetition(transcript.sampled) for transcript in self.transcripts])),
        }


@dataclass(eq=False)
class Writer:
    """Samples answers to prompts and rewards them; several `ranks` share the work.

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
            Answer(written.prompt, written.text, [*question.token_ids, *written.token_ids], question.fields)
            for question, written in zip(repeats, completions, strict=True)
        ]
        spans = [
            (len(question.token_ids), len(answer.token_ids)) for question, answer in zip(repeats, answers, strict=True)
        ]
        transcripts = [Transcript(answer.token_ids, [span]) for answer, span in zip(answers, spans, strict=True)]
        finished = [written.finish_reason == "stop" for written in completions]
        return self._rewarded(answers, transcripts, finished, [written.logprobs for written in completions])

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
        if not np.isfinite(rewards).any():
            raise TrainingError(f"{' and '.join(self._weights)} judged none of {counted(len(answers), 'answer')}")
        return Written(answers, transcripts, finished, rewards, parts, logprobs)

    def _judged(self, answers: Sequence[Answer]) -> list[dict[str, float | None]]:
        """The rewards of every answer by source."""
        found = [reward(answers) if answers else [] for _, reward in self.rewards.values()]
        return [
            {name: values[number] for name, values in zip(self.rewards, found, strict=True)}
            for number in range(len(answers))
        ]

    @property
    def _weights(self) -> dict[str, float]:
        """The weights of all sources of rewards by their names."""
        own = {name: weight for name, (weight, _) in self.rewards.items()}
        return own if self.conversing is None else {**own, _ENVIRONMENT: 1.0}

    def _total(self, part: Mapping[str, float | None], answer: Answer) -> float:
        """The weighted sum of an answer's rewards; without any NaN, or `TrainingError` unless that `may_miss`."""
        weighted = [self._weights[name] * value for name, value in part.items() if value is not None]
        if not weighted and not self.may_miss:
            raise TrainingError(
                f"{' and '.join(self._weights)} gave None for {_shown([answer], 0)}, which is not a finite number"
            )
        return sum(weighted) if weighted else math.nan


def _spoken(conversations: Sequence[Conversation]) -> tuple[Any, ...]:
    """The arguments of `Writer._rewarded` for conversations; programs get their messages as a further field."""
    answers = [
        Answer(each.prompt, each.text, each.sequence, {**each.state.row, "messages": each.messages})
        for each in conversations
    ]
    transcripts = [Transcript(each.token_ids, each.spans, each.starts) for each in conversations]
    finished, logprobs = [each.is_finished for each in conversations], [each.logprobs for each in conversations]
    return answers, transcripts, finished, logprobs, [each.reward for each in conversations]


def _checked(rewards: Sequence[Any], answers: Sequence[Answer], source: str) -> list[float | None]:
    if len(rewards) != len(answers):
        raise TrainingError(f"{source} gave {len(rewards):,} rewards for {len(answers):,} answers")
    for number, found in enumerate(rewards):
        if found is not None and (not isinstance(found, bool | int | float) or not math.isfinite(found)):
            raise TrainingError(f"{source} gave {found!r} for {_shown(answers, number)}, which is not a finite number")
    return [None if found is None else float(found) for found in rewards]


def _shown(answers: Sequence[Answer], number: int) -> str:
    """Names an answer by its beginning."""
    if number >= len(answers):
        return "the last answer"
    text = answers[number].completion
    return f"the answer {text[:_SHOWN_CHARACTERS]!r}{'...' if len(text) > _SHOWN_CHARACTERS else ''}"
