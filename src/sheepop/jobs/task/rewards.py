"""Post-training on rewards: a policy answers prompts and learns from the rewards of its answers, by PPO or GRPO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.preferences import without_dropout
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import GRPOConfig, PPOConfig, RolloutConfig
from sheepop.posttrain.conversations import Conversing
from sheepop.posttrain.environment import Environment
from sheepop.posttrain.example_batches import ExampleRows
from sheepop.posttrain.example_store import ExampleSplit, ExampleStore
from sheepop.posttrain.policy import (
    AnswerBatch,
    PolicyObjective,
    RewardScores,
    no_numbers,
)
from sheepop.posttrain.reward_methods import GroupPolicy, ProximalPolicy, RewardMethod
from sheepop.posttrain.rewards import Reward, Writer, Written, open_reward
from sheepop.posttrain.rollouts import RolloutSource, questions_of
from sheepop.posttrain.rows import Prompt, Row
from sheepop.serve.answer_text import answer_reader
from sheepop.tokenizer import Tokenizer
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
        """Rows of the same sizes as those of training steps, with nothing to learn in them."""
        indices = check_indices(sample_indices, self.num_samples)
        prompts = [self.split.example(index % self.split.num_groups).ids for index in indices.tolist()]
        lengths = np.array([len(prompt) + self.max_new_tokens for prompt in prompts], dtype=np.int64)
        shape = (len(prompts), int(lengths.max(initial=1)))
        ids, labels = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            labels[row, len(prompt) - 1 : lengths[row] - 1] = self.pad_id
        return AnswerBatch.of(ids, labels, lengths, no_numbers(shape))


class PolicyTask(ExampleTask):
    """Post-training on rewards: the policy answers prompts, and each answer gets a reward."""

    @property
    @abstractmethod
    def settings(self) -> PPOConfig | GRPOConfig:
        """The settings of the method."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """The number of answers to each prompt."""

    @abstractmethod
    def method(self) -> RewardMethod:
        """How the method turns rewards into advantages."""

    @property
    def row_type(self) -> type[Row]:
        """Prompts."""
        return Prompt

    @property
    def keeps_base(self) -> bool:
        """The run keeps the initial model for the reference and its end tokens."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether the loss, the rewards or a limit contain the divergence from the reference."""
        return self.settings.kl_coef > 0 or self.settings.kl_ceiling is not None

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
        if not settings.rewards and settings.environment is None:
            raise ConfigError(
                f"Nothing judges the answers. Give --reward, or {method}.reward: a reward model, a Python file or an "
                "address; or an --environment, whose steps give rewards."
            )
        size = config.training.global_batch_size * settings.minibatches
        if size % self.answers:
            raise ConfigError(
                f"A rollout has training.global_batch_size x {method}.minibatches = {size} answers, which is no "
                f"multiple of the {self.answers} answers to each prompt."
            )
        if config.training.batch_size_warmup:
            raise ConfigError("training.batch_size_warmup is not for rollouts, whose size is fixed. Leave it out.")
        return without_dropout(config, given)

    def needed_length(self, store: ExampleStore) -> int:
        """The tokens of the longest prompt with the longest answer."""
        return store.longest + self.settings.max_new_tokens

    def describe(self) -> str:
        """The number of prompts."""
        return f"{counted(self.store.train.num_groups, 'prompt')}; {self.store.validation.num_groups:,} held out"

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
        """The sources of rewards with their weights: models, programs or services."""
        return open_rewards(self.settings, self.tokenizer(), resolve_device(self.config.device), self.evaluation_batch)

    @cached_property
    def conversing(self) -> Conversing | None:
        """The conversations with the environment of the settings, which is opened; None without one."""
        settings, tokenizer = self.settings, self.tokenizer()
        if settings.environment is None:
            return None
        may_fail = settings.missing_rewards == "leave_out"
        environment = Environment.open(settings.environment.file, settings.reward_seconds, may_fail=may_fail)
        template = self.template(tokenizer)
        return Conversing(environment, template, answer_reader(tokenizer, template), settings.environment.max_turns)

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
        assert isinstance(objective, PolicyObjective)
        training, split = self.config.training, self.store.train
        return RolloutSource(
            prompts=split,
            order=SampleOrder(split.num_groups, self.config.seed),
            writer=self._writer(placement.layout.ranks),
            method=self.method(),
            objective=objective,
            placement=placement,
            reference=self._reference(placement) if self.needs_reference else None,
            config=self.settings,
            batch_size=training.global_batch_size,
            micro_batch_size=training.resolved().micro_batch_size,
            row_length=self.rows(split).max_length,
            answers_per_prompt=self.answers,
            seed=self.config.seed,
            pad_id=self.tokenizer().filler_id,
            hashed=training.log_batch_hash,
        )

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

    def _writer(self, ranks: Ranks) -> Writer:
        settings = self.settings
        return Writer(
            self.tokenizer(),
            self.rewards,
            settings.max_new_tokens,
            settings.temperature,
            self._end_ids,
            _TOGETHER,
            ranks,
            settings.missing_rewards == "leave_out",
            self.conversing,
        )

    def _reference(self, placement: Placement) -> Transformer:
        """The reference model; with LoRA, the policy without its adapter."""
        if self.config.tuning.lora is not None and self.config.tuning.reference is None:
            return without_changes(placement.model).eval()
        return self.reference(placement.device, working_dtype(self.config.training.precision) or torch.float32)

    def held_out(self) -> Batches | None:
        """Held-out prompts, each to be answered once."""
        split = self.store.validation
        if not split.num_groups:
            return None
        return PromptRows(split, 1, self.settings.max_new_tokens, self.tokenizer().filler_id)

    def score(
        self,
        model: Transformer,
        held_out: Batches,
        device: str,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> Scores:
        """The rewards of answers to held-out prompts, sampled with the same seeds each time."""
        assert isinstance(held_out, PromptRows)
        chosen = scored_samples(held_out, max_tokens).tolist()
        writer, found = self._writer(ranks), Written()
        for start in range(0, len(chosen), _TOGETHER):
            some = chosen[start : start + _TOGETHER]
            seed = derive_seed(self.config.seed, "held-out answers", start)
            found = found.and_more(writer(model, questions_of(held_out.split, some), 1, seed))
            if on_batch is not None:
                on_batch(len(some))
        means = found.metrics()
        return RewardScores(
            -means["reward"], means["reward"], means["length"], means["truncated"], means["repetition"], len(found)
        )


def open_rewards(
    settings: RolloutConfig, tokenizer: Tokenizer, device: str, batch_size: int
) -> Mapping[str, tuple[float, Reward]]:
    """Opens all sources of rewards; returns them with their weights, by the names that the settings give them."""
    may_fail = settings.missing_rewards == "leave_out"
    options: dict[str, Any] = {"device": device, "batch_size": batch_size, "may_fail": may_fail}
    return {
        place: (weight, open_reward(place, settings.reward_seconds, tokenizer, **options))
        for place, weight in settings.rewards.items()
    }


class GroupPolicyTask(PolicyTask):
    """GRPO: rewards are compared within a group of answers to the same prompt."""

    @property
    def settings(self) -> GRPOConfig:
        """The settings under `tuning.grpo`."""
        return self.config.tuning.grpo

    @property
    def answers(self) -> int:
        """The size of a group."""
        return self.settings.group_size

    def method(self) -> RewardMethod:
        """Advantages within groups."""
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
