"""Samples answers to prompts, and rewards them by a reward model, a Python program of the user, or an HTTP service."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import LoadedModel, load_model
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, TimeLimitError
from sheepop.core.errors import ConfigError, DataError, TrainingError, UsageError
from sheepop.core.http_client import HttpClient
from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.policy import repetition
from sheepop.posttrain.preference import answer_rewards
from sheepop.tokenizer import Tokenizer

_CHILD = "sheepop.posttrain.reward_child"
_MEMORY_BYTES = 2**31
_SHOWN_CHARACTERS = 80
_ATTEMPTS = 5
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

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Returns one finite number per answer; raises `TrainingError` naming the answer if there is none."""

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

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The outputs of the scalar head at the last tokens."""
        rows, loaded = [list(answer.token_ids) for answer in answers], self.model
        if (longest := max(map(len, rows), default=0)) > (most := loaded.config.max_seq_len):
            raise TrainingError(
                f"The reward model reads {most:,} tokens, but an answer with its prompt has {longest:,}."
            )
        found = answer_rewards(loaded.model, rows, batch_size=self.batch_size, pad_id=loaded.tokenizer.filler_id)
        return _checked(found.tolist(), answers, str(loaded.directory))


class ProgramReward(Reward):
    """The function ``reward(prompt, completion, **fields)`` of a Python file, run in a separate process with limits.

    It has `seconds` for each answer, 2 GiB of memory, and no network if Linux allows that.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=seconds)
        # Linux ends the process together with the thread that started it, so this object has a thread for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The return values of the function."""
        found: list[Any] = []
        try:
            self._thread.submit(self._ask, answers, found).result()
        except BoundedProcessError as error:
            where = _shown(answers, len(found))
            problem = f"{'failed for' if isinstance(error, HandlerError) else 'ended at'} {where}: {error}"
            if isinstance(error, TimeLimitError):
                problem = f"took more than {self._seconds:g} s for {where}. Fix it, or give it more time."
            raise TrainingError(f"The reward program {self._path} {problem}") from None
        return _checked(found, answers, str(self._path))

    def _ask(self, answers: Sequence[Answer], found: list[Any]) -> None:
        request = {"program": str(self._path.resolve()), "answers": [answer.to_dict() for answer in answers]}
        with closing(self._process.request(request)) as replies:
            found.extend(replies)

    def close(self) -> None:
        """Ends the process."""
        self._thread.submit(self._process.close).result()
        self._thread.shutdown()


class EndpointReward(Reward):
    """A service that gets ``{"answers": [...]}`` by POST, with objects of `Answer.to_dict`, and replies
    ``{"rewards": [...]}``. It has `seconds` for each answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._client, self._url, self._seconds = HttpClient(url, expected=_EXPECTED), url, seconds

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
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
            raise TrainingError(f"Answers cannot be judged: {error}") from None
        if not isinstance(rewards, list):
            raise TrainingError(f'{self._url} did not reply with an object {{"rewards": [...]}}')
        return _checked(rewards, answers, self._url)


def open_reward(place: str, seconds: float, tokenizer: Tokenizer, *, device: str, batch_size: int) -> Reward:
    """Opens a source of rewards (a URL, a Python file, or a reward model or its name) and tests it with an empty list.

    `seconds` is the time limit per answer of the first two. Raises `ConfigError` if it does not work.
    """
    reward: Reward
    if place.startswith(("http://", "https://")):
        try:
            reward = EndpointReward(place, seconds)
        except UsageError as error:
            raise ConfigError(str(error)) from None
    elif not Path(place).exists() and (place.endswith(".py") or PublishedName.parse(place) is None):
        raise ConfigError(f"{place} does not exist, so it cannot judge answers.")
    elif place.endswith(".py"):
        reward = ProgramReward(Path(place), seconds)
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

    `logprobs` are those of their tokens under the policy in the sampler. `advantages` are empty until a `RewardMethod`
    has computed them.
    """

    answers: list[Answer] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    is_finished: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
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

    def metrics(self) -> dict[str, float]:
        """Means over the answers."""
        pairs = zip(self.answers, self.prompt_lengths, strict=True)
        sampled = [answer.token_ids[prompt:] for answer, prompt in pairs]
        return {
            "reward": float(np.mean(self.rewards)),
            "reward_deviation": float(np.std(self.rewards)),
            "length": float(np.mean(self.lengths)),
            "truncated": 1 - float(np.mean(self.is_finished)),
            "repetition": float(np.mean([repetition(token_ids) for token_ids in sampled])),
        }


@dataclass(frozen=True)
class Question:
    """A tokenised prompt, with the other keys of its line."""

    token_ids: list[int]
    fields: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Writer:
    """Samples answers to prompts and rewards them; several `ranks` share the work."""

    tokenizer: Tokenizer
    reward: Reward
    max_new_tokens: int
    temperature: float
    end_ids: Sequence[int] = ()
    max_batch_size: int = 128
    ranks: Ranks = ALONE

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
            Answer(written.prompt, written.text, [*question.token_ids, *written.token_ids], question.fields)
            for question, written in zip(repeats, completions, strict=True)
        ]
        lengths = [len(question.token_ids) for question in repeats]
        finished = [written.finish_reason == "stop" for written in completions]
        rewards = self.ranks.shared(len(repeats), lambda own: self.reward(answers[own.start : own.stop]) if own else [])
        return Written(answers, lengths, finished, rewards, [written.logprobs for written in completions])


def _checked(rewards: Sequence[Any], answers: Sequence[Answer], source: str) -> list[float]:
    if len(rewards) != len(answers):
        raise TrainingError(f"{source} gave {len(rewards):,} rewards for {len(answers):,} answers")
    for number, found in enumerate(rewards):
        if not isinstance(found, bool | int | float) or not math.isfinite(found):
            raise TrainingError(f"{source} gave {found!r} for {_shown(answers, number)}, which is not a finite number")
    return [float(found) for found in rewards]


def _shown(answers: Sequence[Answer], number: int) -> str:
    """Names an answer by its beginning."""
    if number >= len(answers):
        return "the last answer"
    text = answers[number].completion
    return f"the answer {text[:_SHOWN_CHARACTERS]!r}{'...' if len(text) > _SHOWN_CHARACTERS else ''}"
