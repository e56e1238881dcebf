"""Samples answers to prompts from a model and rewards them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.policy import repetition
from sheepop.posttrain.rewards import Answer, Reward
from sheepop.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Written:
    """N sampled answers with their rewards, those of one prompt next to each other.

    `advantages` are empty until a `RewardMethod` has computed them.
    """

    answers: list[Answer]
    prompt_lengths: list[int]
    is_finished: list[bool]
    rewards: list[float]
    advantages: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def lengths(self) -> list[int]:
        """The number of sampled tokens of each answer."""
        pairs = zip(self.answers, self.prompt_lengths, strict=True)
        return [len(answer.token_ids) - prompt for answer, prompt in pairs]

    def learnt_from(self, advantages: Sequence[float | None]) -> Written:
        """The answers whose advantage is not None, with their advantages."""
        kept = [number for number, advantage in enumerate(advantages) if advantage is not None]
        return Written(
            [self.answers[number] for number in kept],
            [self.prompt_lengths[number] for number in kept],
            [self.is_finished[number] for number in kept],
            [self.rewards[number] for number in kept],
            [advantage for advantage in advantages if advantage is not None],
        )

    def and_more(self, others: Written) -> Written:
        """Concatenates these and other answers."""
        return Written(
            self.answers + others.answers,
            self.prompt_lengths + others.prompt_lengths,
            self.is_finished + others.is_finished,
            self.rewards + others.rewards,
            self.advantages + others.advantages,
        )

    def metrics(self) -> dict[str, float]:
        """Means over the answers."""
        lengths, answers = self.lengths, self.answers
        repeated = [
            repetition(answer.token_ids[prompt:]) for answer, prompt in zip(answers, self.prompt_lengths, strict=True)
        ]
        return {
            "reward": float(np.mean(self.rewards)),
            "reward_deviation": float(np.std(self.rewards)),
            "length": float(np.mean(lengths)),
            "truncated": 1 - float(np.mean(self.is_finished)),
            "repetition": float(np.mean(repeated)),
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
        return Written(answers, lengths, finished, rewards)
