"""Post-training on rewards: a policy answers prompts and learns from how its answers are judged, by PPO or GRPO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.adapt.lora import without_changes
from sheepop.adapt.scalar_head import VALUE_HEAD, VALUE_MODEL, add_scalar_head
from sheepop.checkpoint import load_model
from sheepop.checkpoint.model_form import ModelForm, WithValues
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.core.random import derive_seed
from sheepop.data import Batches, SampleOrder, StepPlan
from sheepop.data.batches import IGNORED_LABEL, check_indices
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.preference_tuning import without_dropout
from sheepop.jobs.run_kind import evaluation_batch
from sheepop.jobs.tuned_data import TunedData, row_length
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import RolloutConfig
from sheepop.posttrain.example_store import ExampleSplit
from sheepop.posttrain.policy import (
    AnswerBatch,
    PolicyObjective,
    RewardScores,
    no_numbers,
)
from sheepop.posttrain.reward_methods import GroupPolicy, ProximalPolicy, RewardMethod
from sheepop.posttrain.rewards import Reward, open_reward
from sheepop.posttrain.rollouts import RolloutSource, questions_of
from sheepop.posttrain.rows import Prompt, Row
from sheepop.posttrain.written import Writer, Written
from sheepop.train import Scores
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.precision import working_dtype
from sheepop.train.source import StepSource
from sheepop.train.validation import scored_samples

# Answers that are written at a time, as far as memory has room for their keys and values.
_TOGETHER = 128


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Sample i is an answer to prompt ``i mod P`` of a split, as long as answers may be, for measuring steps."""

    split: ExampleSplit
    answers: int
    max_new_tokens: int
    pad_id: int

    @property
    def num_samples(self) -> int:
        """How many answers one pass over the prompts has."""
        return self.split.num_groups * self.answers

    @property
    def max_length(self) -> int:
        """The longest prompt and the longest answer."""
        return int(self.split.lengths.max(initial=1)) + self.max_new_tokens

    @property
    def tokens_per_sample(self) -> float:
        """The longest answer to a prompt of mean length."""
        return self.split.num_tokens / max(1, self.split.num_groups) + self.max_new_tokens

    def batch(self, sample_indices: NDArray[np.int64]) -> AnswerBatch:
        """Rows of the sizes that steps have, with nothing to learn in them."""
        indices = check_indices(sample_indices, self.num_samples)
        prompts = [self.split.example(index % self.split.num_groups).ids for index in indices.tolist()]
        lengths = np.array([len(prompt) + self.max_new_tokens for prompt in prompts], dtype=np.int64)
        shape = (len(prompts), int(lengths.max(initial=1)))
        ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            labels[row, len(prompt) - 1 : lengths[row] - 1] = self.pad_id
        return AnswerBatch.of(ids, labels, lengths, no_numbers(shape))


class PolicyData(TunedData):
    """Prompts, and what judges the answers to them."""

    @staticmethod
    @abstractmethod
    def settings(config: SheepOpConfig) -> RolloutConfig:
        """Those of the method."""

    @staticmethod
    @abstractmethod
    def answers(config: SheepOpConfig) -> int:
        """How many answers each prompt gets."""

    @abstractmethod
    def method(self, config: SheepOpConfig) -> RewardMethod:
        """What the rewards mean."""

    @staticmethod
    def row_type(config: SheepOpConfig) -> type[Row]:
        """Prompts."""
        return Prompt

    @staticmethod
    def keeps_base(config: SheepOpConfig) -> bool:
        """For the reference, and for what ends its texts."""
        return True

    @classmethod
    def most_tokens(cls, config: SheepOpConfig) -> int:
        """What answers leave of a row; raises `ConfigError` where that is nothing."""
        length, answer = row_length(config), cls.settings(config).max_new_tokens
        if length <= answer:
            raise ConfigError(
                f"tuning.{config.tuning.method}.max_new_tokens = {answer} leaves no room for a prompt in "
                f"{length} tokens. Lower it."
            )
        return length - answer

    @classmethod
    def fitted(cls, config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
        """`config` without dropout; raises `ConfigError` for what cannot be."""
        method, settings = f"tuning.{config.tuning.method}", cls.settings(config)
        if config.tuning.long_examples == "cut":
            raise ConfigError("A prompt without its end is another prompt: choose tuning.long_examples=leave_out.")
        if settings.temperature != 1.0 and config.model.logit_soft_cap is not None:
            raise ConfigError(f"{method}.temperature is 1 for models with model.logit_soft_cap. Leave it out.")
        if settings.reward is None:
            raise ConfigError(
                f"Nothing judges the answers. Give --reward, or {method}.reward: a reward model, a Python file or an "
                "address."
            )
        size = config.training.global_batch_size * settings.minibatches
        if size % cls.answers(config):
            raise ConfigError(
                f"A rollout has training.global_batch_size x {method}.minibatches = {size} answers, which is no "
                f"multiple of the {cls.answers(config)} answers to each prompt."
            )
        if config.training.batch_size_warmup:
            raise ConfigError("training.batch_size_warmup is not for rollouts, whose size is fixed. Leave it out.")
        return without_dropout(config, asked)

    def describe(self) -> str:
        """How many prompts there are."""
        return f"{counted(self.store.train.num_groups, 'prompt')}; {self.store.validation.num_groups:,} held out"

    def check(self, config: SheepOpConfig) -> None:
        """Refuses prompts that the model cannot answer, and what cannot judge answers."""
        super().check(config)
        self.reward(config)

    def reward(self, config: SheepOpConfig) -> Reward:
        """What judges answers."""
        settings: RolloutConfig = self.settings(config)
        assert settings.reward is not None
        if settings.reward not in self._rewards:
            self._rewards[settings.reward] = open_reward(
                settings.reward,
                settings.reward_seconds,
                self.tokenizer(),
                device=resolve_device(config.device),
                batch_size=evaluation_batch(config),
            )
        return self._rewards[settings.reward]

    @cached_property
    def _rewards(self) -> dict[str, Reward]:
        return {}

    @cached_property
    def _end_ids(self) -> tuple[int, ...]:
        return load_model(self.base).end_ids

    def rows(self, split: ExampleSplit, config: SheepOpConfig) -> Batches:
        """Answers to the prompts of a split."""
        passes = self.answers(config) * self.settings(config).epochs
        return PromptRows(split, passes, self.settings(config).max_new_tokens, self.tokenizer().filler_id)

    def source(self, config: SheepOpConfig, plan: StepPlan, objective: Objective, placement: Placement) -> StepSource:
        """Rollouts of the policy in training."""
        assert isinstance(objective, PolicyObjective)
        training, split = config.training, self.store.train
        return RolloutSource(
            prompts=split,
            order=SampleOrder(split.num_groups, config.seed),
            writer=self._writer(config, placement.layout.ranks),
            method=self.method(config),
            objective=objective,
            placement=placement,
            reference=self._reference(config, placement) if self.needs_reference(config) else None,
            config=self.settings(config),
            batch_size=training.global_batch_size,
            micro_batch_size=training.resolved().micro_batch_size,
            answers_per_prompt=self.answers(config),
            seed=config.seed,
            pad_id=self.tokenizer().filler_id,
            hashed=training.log_batch_hash,
        )

    def _writer(self, config: SheepOpConfig, ranks: Ranks) -> Writer:
        settings = self.settings(config)
        return Writer(
            self.tokenizer(),
            self.reward(config),
            settings.max_new_tokens,
            settings.temperature,
            self._end_ids,
            _TOGETHER,
            ranks,
        )

    def _reference(self, config: SheepOpConfig, placement: Placement) -> Transformer:
        """Where the policy is a change beside the model that it began with, the same weights without that."""
        if config.tuning.lora is not None and config.tuning.reference is None:
            return without_changes(placement.model).eval()
        dtype = working_dtype(config.training.precision) or torch.float32
        return self.reference(config, placement.device, dtype)

    def held_out(self, config: SheepOpConfig) -> Batches | None:
        """Held-out prompts, each to be answered once."""
        split, settings = self.store.validation, self.settings(config)
        return PromptRows(split, 1, settings.max_new_tokens, self.tokenizer().filler_id) if split.num_groups else None

    def score(
        self,
        model: Transformer,
        held_out: Batches,
        config: SheepOpConfig,
        device: str,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> Scores:
        """How answers to held-out prompts are judged; the draws are the same every time."""
        assert isinstance(held_out, PromptRows)
        chosen = scored_samples(held_out, max_tokens).tolist()
        writer, found = self._writer(config, ranks), Written([], [], [], [])
        for start in range(0, len(chosen), _TOGETHER):
            some = chosen[start : start + _TOGETHER]
            seed = derive_seed(config.seed, "held-out answers", start)
            found = found.and_more(writer(model, questions_of(held_out.split, some), 1, seed))
            if on_batch is not None:
                on_batch(len(some))
        means = found.metrics()
        return RewardScores(
            -means["reward"], means["reward"], means["length"], means["truncated"], means["repetition"], len(found)
        )


class GroupPolicyData(PolicyData):
    """Prompts whose answers are judged in groups."""

    @staticmethod
    def settings(config: SheepOpConfig) -> RolloutConfig:
        """GRPO's."""
        return config.tuning.grpo

    @staticmethod
    def answers(config: SheepOpConfig) -> int:
        """A group."""
        return config.tuning.grpo.group_size

    @classmethod
    def needs_reference(cls, config: SheepOpConfig) -> bool:
        """Where divergence is in the loss, or watched."""
        return config.tuning.grpo.kl_coef > 0 or config.tuning.grpo.kl_ceiling is not None

    def method(self, config: SheepOpConfig) -> RewardMethod:
        """GRPO."""
        return GroupPolicy(config.tuning.grpo)

    def objective(self, config: SheepOpConfig) -> Objective:
        """The clipped surrogate, and the divergence beside it."""
        grpo = config.tuning.grpo
        return PolicyObjective(
            temperature=grpo.temperature,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            entropy_coef=grpo.entropy_coef,
            kl_coef=grpo.kl_coef,
            estimator=grpo.kl_estimator,
            unit="token" if grpo.loss_type == "dapo" else "answer",
        )


class ProximalPolicyData(PolicyData):
    """Prompts whose answers are judged token by token, by a value model that learns along."""

    @staticmethod
    def settings(config: SheepOpConfig) -> RolloutConfig:
        """PPO's."""
        return config.tuning.ppo

    @staticmethod
    def answers(config: SheepOpConfig) -> int:
        """One."""
        return 1

    @classmethod
    def needs_reference(cls, config: SheepOpConfig) -> bool:
        """Where divergence has a price, or is watched."""
        ppo = config.tuning.ppo
        return ppo.kl_coef > 0 or ppo.kl_ceiling is not None

    def method(self, config: SheepOpConfig) -> RewardMethod:
        """PPO."""
        return ProximalPolicy(config.tuning.ppo)

    def objective(self, config: SheepOpConfig) -> Objective:
        """The clipped surrogate, and the loss of the value model beside it."""
        ppo = config.tuning.ppo
        return PolicyObjective(
            temperature=ppo.temperature,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            entropy_coef=ppo.entropy_coef,
            vf_coef=ppo.vf_coef,
            value_clip=ppo.value_clip,
        )

    def network(self, config: SheepOpConfig, device: str) -> Transformer:
        """The policy with what judges its states: a head, or a copy of it with one."""
        model = super().network(config, device)
        if config.tuning.ppo.value_model == "shared":
            add_scalar_head(model, VALUE_HEAD)
            return model
        values = load_model(self.base, device, torch.float32).model
        if not config.model.tie_weights:
            values.lm_head.requires_grad_(False)
        add_scalar_head(values, VALUE_HEAD)
        model.add_module(VALUE_MODEL, values)
        return model

    def form(self, model: Transformer, config: SheepOpConfig) -> ModelForm:
        """The policy as ever, and what judges it beside it."""
        return WithValues(super().form(model, config))
