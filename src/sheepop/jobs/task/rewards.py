"""Post-training on a model's own answers to prompts; by PPO or GRPO it learns from their rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.adapt.lora import without_changes
from sheepop.adapt.scalar_head import VALUE_HEAD, VALUE_MODEL, add_scalar_head
from sheepop.checkpoint import load_model
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation, with_ends
from sheepop.checkpoint.model_form import ModelForm, WithValues
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.core.random import derive_seed
from sheepop.data import Batches, SampleOrder
from sheepop.data.batches import IGNORED_LABEL, check_indices
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.environment import Environment
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.preferences import without_dropout
from sheepop.jobs.task.reward_sources import open_rewards
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import EnvironmentConfig, GRPOConfig, PPOConfig, SamplingConfig
from sheepop.posttrain.conversations import Conversing
from sheepop.posttrain.example_batches import ExampleRows
from sheepop.posttrain.example_store import ExampleSplit, ExampleStore
from sheepop.posttrain.policy import (
    AnswerBatch,
    PolicyObjective,
    RewardScores,
    no_numbers,
)
from sheepop.posttrain.reward_methods import GroupPolicy, ProximalPolicy, RewardMethod
from sheepop.posttrain.rewards import Reward, Writer, Written
from sheepop.posttrain.rollouts import RolloutSource, questions_of
from sheepop.posttrain.rows import Prompt, Row
from sheepop.serve.answer_text import answer_reader
from sheepop.train import Scores
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.precision import working_dtype
from sheepop.train.source import StepSource
from sheepop.train.validation import scored_samples

# The most answers written at a time, if their KV cache fits into memory.
_TOGETHER = 128


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Rows of the longest answers, to measure steps with: sample i answers prompt ``i mod P`` of a split."""

    split: ExampleSplit
    answers: int
    max_new_tokens: int
    pad_id: int

    @property
    def num_samples(self) -> int:
        """The number of answers in one pass over the prompts."""
        return self.split.num_groups * self.answers

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return int(self.split.lengths.max(initial=1)) + self.max_new_tokens

    @property
    def tokens_per_sample(self) -> float:
        """Tokens of a prompt of mean length with the longest answer."""
        return self.split.num_tokens / max(1, self.split.num_groups) + self.max_new_tokens

    def examples(self, sample: int) -> list[int]:
        """Returns the number of the prompt that the sample answers, as a list of one."""
        return [sample % self.split.num_groups]

    def batch(self, sample_indices: NDArray[np.int64]) -> AnswerBatch:
        """Rows with the sizes of those in training steps, but without labels."""
        indices = check_indices(sample_indices, self.num_samples)
        prompts = [self.split.example(index % self.split.num_groups).ids for index in indices.tolist()]
        lengths = np.array([len(prompt) + self.max_new_tokens for prompt in prompts], dtype=np.int64)
        shape = (len(prompts), int(lengths.max(initial=1)))
        ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            labels[row, len(prompt) - 1 : lengths[row] - 1] = self.pad_id
        return AnswerBatch.of(ids, labels, lengths, no_numbers(shape))


class RolloutTask(ExampleTask):
    """Post-training on answers that the model writes itself, to the prompts of the examples."""

    @property
    @abstractmethod
    def settings(self) -> SamplingConfig:
        """The settings of the method."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """The number of answers to each prompt."""

    @abstractmethod
    def method(self) -> RewardMethod:
        """The method, which turns the rewards of a rollout into advantages and numbers for the objective."""

    @property
    def row_type(self) -> type[Row]:
        """Lines with a prompt."""
        return Prompt

    @property
    def keeps_base(self) -> bool:
        """The run keeps the initial model for the reference and its end tokens."""
        return True

    @property
    def most_tokens(self) -> int:
        """Longest prompt that fits; raises `ConfigError` if answers leave no room for one."""
        length, answer = self.row_length, self.settings.max_new_tokens
        if length <= answer:
            raise ConfigError(
                f"tuning.{self.config.tuning.method}.max_new_tokens = {answer} leaves no room for a prompt in "
                f"{length} tokens. Lower it."
            )
        return length - answer

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """The settings without dropout; raises `ConfigError` for settings that rollouts cannot have."""
        config, settings = self.config, self.settings
        method = f"tuning.{config.tuning.method}"
        if config.tuning.long_examples == "cut":
            raise ConfigError("A prompt without its end is another prompt: choose tuning.long_examples=leave_out.")
        if settings.temperature != 1.0 and config.model.logit_soft_cap is not None:
            raise ConfigError(f"{method}.temperature is 1 for models with model.logit_soft_cap. Leave it out.")
        size = config.training.global_batch_size * settings.minibatches
        if size % self.answers:
            raise ConfigError(
                f"A rollout has training.global_batch_size x {method}.minibatches = {size} answers, which is no "
                f"multiple of the {self.answers} answers to each prompt."
            )
        if config.training.batch_size_warmup:
            raise ConfigError("training.batch_size_warmup is not for rollouts, whose size is fixed. Leave it out.")
        if config.training.mixture:
            raise ConfigError("training.mixture is not for rollouts, which answer all prompts in turn. Leave it out.")
        return without_dropout(config, given)

    def needed_length(self, store: ExampleStore) -> int:
        """The tokens of the longest prompt with the longest answer."""
        return store.longest + self.settings.max_new_tokens

    def describe(self) -> str:
        """The number of prompts."""
        return f"{counted(self.store.train.num_groups, 'prompt')}; {self.store.validation.num_groups:,} held out"

    @cached_property
    def _end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text of the policy."""
        settings = with_ends(read_generation(self.run.base), self.end_ids)
        return end_ids(settings, self.config.model.vocabulary, str(self.run.base / GENERATION))

    def rows(self, split: ExampleSplit) -> ExampleRows:
        """Answers to the prompts of a split, for measuring steps."""
        passes = self.answers * self.settings.epochs
        return PromptRows(split, passes, self.settings.max_new_tokens, self.tokenizer().filler_id)

    def source(self, objective: Objective, placement: Placement) -> StepSource:
        """Rollouts of the policy in training."""
        training, split = self.config.training, self.store.train
        return RolloutSource(
            prompts=split,
            order=SampleOrder(split.num_groups, self.config.seed),
            writer=self.writer(placement.layout.ranks),
            method=self.method(),
            objective=objective,
            placement=placement,
            reference=self.rollout_reference(placement),
            config=self.settings,
            batch_size=training.global_batch_size,
            micro_batch_size=training.resolved().micro_batch_size,
            row_length=self.rows(split).max_length,
            answers_per_prompt=self.answers,
            seed=self.config.seed,
            pad_id=self.tokenizer().filler_id,
            hashed=training.log_batch_hash,
        )

    def rollout_reference(self, placement: Placement) -> Transformer | None:
        """The model that rollouts are compared with, if there is one."""
        return None

    def writer(self, ranks: Ranks) -> Writer:
        """Samples answers, without rewards."""
        settings: SamplingConfig = self.settings
        return Writer(
            self.tokenizer(), {}, settings.max_new_tokens, settings.temperature, self._end_ids, _TOGETHER, ranks
        )

    def held_out(self) -> Batches | None:
        """Held-out prompts, each to be answered once."""
        split = self.store.validation
        if not split.num_groups:
            return None
        return PromptRows(split, 1, self.settings.max_new_tokens, self.tokenizer().filler_id)

    def held_out_answers(
        self,
        model: Transformer,
        held_out: Batches,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> Written:
        """Answers to held-out prompts, sampled with the same seeds each time."""
        assert isinstance(held_out, PromptRows)
        chosen = scored_samples(held_out, max_tokens).tolist()
        writer, found = self.writer(ranks), Written()
        for start in range(0, len(chosen), _TOGETHER):
            some = chosen[start : start + _TOGETHER]
            seed = derive_seed(self.config.seed, "held-out answers", start)
            found = found.and_more(writer(model, questions_of(held_out.split, some), 1, seed))
            if on_batch is not None:
                on_batch(len(some))
        return found


class PolicyTask(RolloutTask):
    """Post-training on rewards: each answer of the policy gets a reward."""

    @property
    @abstractmethod
    def settings(self) -> PPOConfig | GRPOConfig:
        """The settings of the method."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss, the rewards or a limit contain the divergence from the reference."""
        return self.settings.kl_coef > 0 or self.settings.kl_ceiling is not None

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """Also refuses settings without a reward."""
        if not self.settings.rewards and self.settings.environment is None:
            raise ConfigError(
                f"Nothing judges the answers. Give --reward, or tuning.{self.config.tuning.method}.reward: a reward "
                "model, a Python file, an address, judge or code; or an --environment, whose steps give rewards."
            )
        return super().fitted(given)

    def check(self) -> None:
        """Refuses prompts that the model cannot answer, and a reward that cannot be opened."""
        super().check()
        _ = self.rewards, self.conversing
        counts = self.store.manifest["examples"]
        plain = counts["train"] + counts["validation"] - self.store.manifest["conversations"]
        if plain and self.settings.environment is not None:
            raise ConfigError(
                f"{counted(plain, 'prompt')} of the data are plain texts, with which no environment can converse. "
                'Give every line messages: {"messages": [{"role": "user", "content": ...}]}.'
            )

    @cached_property
    def rewards(self) -> Mapping[str, tuple[float, Reward]]:
        """The sources of rewards with their weights."""
        device = resolve_device(self.config.device)
        return open_rewards(self.settings, self.config.tuning, self.tokenizer(), device, self.evaluation_batch)

    @cached_property
    def conversing(self) -> Conversing | None:
        """Opens the environment of the settings for conversations; None if the settings name none."""
        settings, tokenizer = self.settings, self.tokenizer()
        chosen: EnvironmentConfig | None = settings.environment
        if chosen is None:
            return None
        may_fail = settings.missing_rewards == "leave_out"
        environment = Environment.open(chosen.file, settings.reward_seconds, may_fail=may_fail)
        template = self.template(tokenizer)
        return Conversing(environment, template, answer_reader(tokenizer, template), chosen.max_turns)

    def surrogate(self, **more: Any) -> PolicyObjective:
        """The clipped surrogate, with the method's own fields."""
        settings = self.settings
        return PolicyObjective(
            temperature=settings.temperature,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            entropy_coef=settings.entropy_coef,
            **more,
        )

    def writer(self, ranks: Ranks) -> Writer:
        """Samples answers, or conversations, and rewards them."""
        may_miss = self.settings.missing_rewards == "leave_out"
        return replace(super().writer(ranks), rewards=self.rewards, may_miss=may_miss, conversing=self.conversing)

    def rollout_reference(self, placement: Placement) -> Transformer | None:
        """The reference model; with LoRA, the policy without its adapter."""
        if not self.needs_reference:
            return None
        if self.config.tuning.lora is not None and self.config.tuning.reference is None:
            return without_changes(placement.model).eval()
        return self.reference(placement.device, working_dtype(self.config.training.precision) or torch.float32)

    def score(self, model: Transformer, held_out: Batches, device: str, **options: Any) -> Scores:
        """The rewards of answers to held-out prompts."""
        found = self.held_out_answers(model, held_out, **options)
        means = found.metrics()
        return RewardScores.of(-means["reward"], means, len(found))


class GroupPolicyTask(PolicyTask):
    """GRPO: rewards are compared within a group of answers to the same prompt."""

    @property
    def settings(self) -> GRPOConfig:
        """The settings under `tuning.grpo`."""
        return self.config.tuning.grpo

    @property
    def answers(self) -> int:
        """The answers to a prompt: the size of a group."""
        return self.settings.group_size

    def method(self) -> RewardMethod:
        """Group-relative advantages."""
        return GroupPolicy(self.settings)

    def objective(self) -> Objective:
        """The clipped surrogate with a divergence penalty."""
        grpo = self.settings
        return self.surrogate(
            kl_coef=grpo.kl_coef,
            estimator=grpo.kl_estimator,
            unit="token" if grpo.loss_type == "dapo" else "answer",
            surrogate=grpo.surrogate,
            of_answers=grpo.importance_sampling_level == "sequence",
        )


class ProximalPolicyTask(PolicyTask):
    """PPO: a value model, trained along with the policy, estimates the reward at each token."""

    @property
    def settings(self) -> PPOConfig:
        """The settings under `tuning.ppo`."""
        return self.config.tuning.ppo

    @property
    def answers(self) -> int:
        """One answer to a prompt."""
        return 1

    def method(self) -> RewardMethod:
        """Generalised advantage estimation."""
        return ProximalPolicy(self.settings)

    def objective(self) -> Objective:
        """The clipped surrogate with the loss of the value model."""
        return self.surrogate(vf_coef=self.settings.vf_coef, value_clip=self.settings.value_clip)

    def network(self, device: str) -> Transformer:
        """The policy with its value model: a head on it, or a copy of it with a head."""
        model = super().network(device)
        if self.settings.value_model == "shared":
            add_scalar_head(model, VALUE_HEAD)
            return model
        values = load_model(self.run.base, device, torch.float32).model
        if not self.config.model.tie_weights:
            values.lm_head.requires_grad_(False)
        add_scalar_head(values, VALUE_HEAD)
        model.add_module(VALUE_MODEL, values)
        return model

    def form(self, model: Transformer, generation: Mapping[str, Any]) -> ModelForm:
        """Checkpoints store the policy, and the value model beside it."""
        return WithValues(super().form(model, generation))
