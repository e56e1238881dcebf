"""Rewards of answers: from a reward model, the user's own Python function, or an HTTP service."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import LoadedModel, load_model
from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, TimeLimitError
from sheepop.core.errors import ConfigError, DataError, TrainingError, UsageError
from sheepop.core.http_client import HttpClient
from sheepop.posttrain.reward_model import answer_rewards
from sheepop.tokenizer import Tokenizer

_CHILD = "sheepop.posttrain.reward_child"
_MEMORY_BYTES = 2**31
_SHOWN_CHARACTERS = 80
_ATTEMPTS = 5
_EXPECTED = 'Give the address of a service that replies {"rewards": [...]} to {"answers": [...]}.'


@dataclass(frozen=True)
class Answer:
    """What a model wrote behind a prompt, and what else the prompt's line says; `token_ids` are of both."""

    prompt: str
    completion: str
    token_ids: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As a program or a service gets it."""
        return {"prompt": self.prompt, "completion": self.completion, "fields": dict(self.fields)}


class Reward(Protocol):
    """Says what answers are worth; the more, the better."""

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """One finite number for each; raises `TrainingError` naming the answer where there is none."""

    def close(self) -> None:
        """Ends what it runs."""


@dataclass(frozen=True, eq=False)
class ModelReward(Reward):
    """A reward model with the tokenizer of the policy."""

    model: LoadedModel
    batch_size: int

    @classmethod
    def fitting(cls, loaded: LoadedModel, tokenizer: Tokenizer, batch_size: int) -> ModelReward:
        """The reward of a model; raises `ConfigError` for one that is none, or reads other tokens."""
        if not hasattr(loaded.model, REWARD_HEAD):
            raise ConfigError(f"{loaded.directory} is no reward model. Make one with: sheepop tune reward")
        if loaded.tokenizer.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(
                f"The reward model in {loaded.directory} has another tokenizer than the policy, so it cannot read what "
                "that writes. Train it from the same model."
            )
        return cls(loaded, batch_size)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """The numbers that it gives at the last tokens."""
        rows, most = [list(answer.token_ids) for answer in answers], self.model.config.max_seq_len
        if (longest := max(map(len, rows), default=0)) > most:
            raise TrainingError(
                f"The reward model reads {most:,} tokens, but an answer with its prompt has {longest:,}."
            )
        found = answer_rewards(
            self.model.model, rows, batch_size=self.batch_size, pad_id=self.model.tokenizer.filler_id
        )
        return _checked(found.tolist(), answers, str(self.model.directory))

    def close(self) -> None:
        """There is nothing to end."""


class ProgramReward(Reward):
    """The function ``reward(prompt, completion, **fields)`` of a Python file, run in a process with limits.

    It has `seconds` for each answer and 2 GiB of memory, and where Linux allows it no network.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=seconds)
        # Linux ends the process with the thread that started it, so one thread of this object's own asks it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """What the function gives."""
        found: list[Any] = []
        try:
            self._thread.submit(self._ask, answers, found).result()
        except TimeLimitError:
            raise TrainingError(
                f"The reward program {self._path} took more than {self._seconds:g} s for "
                f"{_shown(answers, len(found))}. Mend it, or give it more time."
            ) from None
        except HandlerError as error:
            where = _shown(answers, len(found))
            raise TrainingError(f"The reward program {self._path} failed for {where}: {error}") from None
        except BoundedProcessError as error:
            raise TrainingError(
                f"The reward program {self._path} ended at {_shown(answers, len(found))}: {error}"
            ) from None
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
        """The rewards of its reply. A request without answers, which only tries the service, is not repeated."""
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

    def close(self) -> None:
        """There is nothing to end."""


def open_reward(place: str, seconds: float, tokenizer: Tokenizer, *, device: str, batch_size: int) -> Reward:
    """Opens the reward at `place`, an address, a Python file or a reward model, and calls it once without answers.

    A service or a program has `seconds` for each answer. Raises `ConfigError` if the reward cannot be used.
    """
    reward: Reward
    if place.startswith(("http://", "https://")):
        try:
            reward = EndpointReward(place, seconds)
        except UsageError as error:
            raise ConfigError(str(error)) from None
    elif not Path(place).exists():
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


def _checked(rewards: Sequence[Any], answers: Sequence[Answer], source: str) -> list[float]:
    if len(rewards) != len(answers):
        raise TrainingError(f"{source} gave {len(rewards):,} rewards for {len(answers):,} answers")
    for number, found in enumerate(rewards):
        if not isinstance(found, bool | int | float) or not math.isfinite(found):
            raise TrainingError(f"{source} gave {found!r} for {_shown(answers, number)}, which is no finite number")
    return [float(found) for found in rewards]


def _shown(answers: Sequence[Answer], number: int) -> str:
    """An answer in words, by its beginning."""
    if number >= len(answers):
        return "the last answer"
    text = answers[number].completion
    return f"the answer {text[:_SHOWN_CHARACTERS]!r}{'...' if len(text) > _SHOWN_CHARACTERS else ''}"
