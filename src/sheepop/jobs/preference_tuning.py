"""Post-training on preferences: the DPO family, and reward models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head
from sheepop.core.errors import ConfigError, DataError
from sheepop.core.files import atomic_file
from sheepop.core.program import typed
from sheepop.data import Batches, StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run_kind import Samples, evaluation_batch
from sheepop.jobs.tuned_data import TunedData, row_length
from sheepop.model import ModelConfig, Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import REFERENCE_FREE
from sheepop.posttrain.example_batches import GroupedExamples
from sheepop.posttrain.example_store import ExampleSplit
from sheepop.posttrain.preference import JudgedAnswers, PairwisePreference, PreferenceLoss, PreferenceScores
from sheepop.posttrain.reward_model import PairwiseReward, reward_scores
from sheepop.posttrain.rows import Judged, Preference, Row
from sheepop.posttrain.sequences import MeanLosses, log_probabilities_of, mean_losses
from sheepop.train import Scores
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.source import StepSource

_REFERENCE = "reference.safetensors"


class PreferenceData(TunedData):
    """Pairs of a chosen and a rejected answer, or answers judged one by one, of which the order is learnt."""

    @staticmethod
    def row_type(config: SheepOpConfig) -> type[Row]:
        """Pairs, but for KTO."""
        return Judged if config.tuning.dpo.loss_type == "kto" else Preference

    @classmethod
    def needs_reference(cls, config: SheepOpConfig) -> bool:
        """All losses but some of pairs."""
        return config.tuning.dpo.loss_type not in REFERENCE_FREE

    @classmethod
    def keeps_base(cls, config: SheepOpConfig) -> bool:
        """For the reference."""
        return cls.needs_reference(config) and config.tuning.reference is None

    @staticmethod
    def fitted(config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
        """`config` without dropout, in which the policy would differ from its reference by chance."""
        return without_dropout(config, asked)

    def describe(self) -> str:
        """How many there are."""
        train, held_out = self.store.train, self.store.validation
        what = "pairs" if train.group_size == 2 else "judged answers"
        return f"{train.num_groups:,} {what} of {train.num_tokens:,} tokens; {held_out.num_groups:,} held out"

    def rows(self, split: ExampleSplit, config: SheepOpConfig) -> Batches:
        """Groups of answers, with their log-probabilities under the reference.

        Before these are known, when steps are measured, zeros stand in their place.
        """
        groups = self._groups(split, config)
        if not self.needs_reference(config):
            return groups
        unknown = np.zeros((split.num_groups, 2), np.float32)
        return groups.with_reference(self._references().get(self._name(split), unknown))

    def objective(self, config: SheepOpConfig) -> Objective:
        """The loss that is asked for."""
        dpo = config.tuning.dpo
        if dpo.loss_type == "kto":
            return JudgedAnswers(dpo.beta, (dpo.desirable_weight, dpo.undesirable_weight))
        loss = PreferenceLoss(dpo.loss_type, dpo.beta, dpo.label_smoothing, dpo.margin)
        return PairwisePreference(loss, dpo.supervised_weight)

    def source(self, config: SheepOpConfig, plan: StepPlan, objective: Objective, placement: Placement) -> StepSource:
        """The batches of the plan, whose answers the reference has read by then."""
        if self.needs_reference(config) and not self._references():
            self._ask_reference(config, placement.device)
            (only,) = plan.sources
            plan = StepPlan(
                [type(only)(self.batches(config), only.order)], plan.sizes, plan.lengths, plan.seed, plan.mixture
            )
        return super().source(config, plan, objective, placement)

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
        """The same loss on held-out answers, and what else was measured on the way."""
        found = mean_losses(
            model,
            self.objective(config),
            held_out,
            batch_size=evaluation_batch(config),
            precision=config.training.precision,
            device=device,
            max_tokens=max_tokens,
            on_batch=on_batch,
            ranks=ranks,
        )
        return self.scores(found)

    def scores(self, found: MeanLosses) -> Scores:
        """How many answers are in the right order."""
        return PreferenceScores.of(found)

    def _groups(self, split: ExampleSplit, config: SheepOpConfig) -> GroupedExamples:
        return GroupedExamples(
            split,
            max_length=row_length(config),
            pad_id=self.tokenizer().filler_id,
            mismatched=self.row_type(config) is Judged,
        )

    def _name(self, split: ExampleSplit) -> str:
        return "train" if split is self.store.train else "validation"

    def _references(self) -> dict[str, NDArray[np.float32]]:
        """Log-probabilities (groups, 2) under the reference by split, as far as they were computed."""
        file = self.place / _REFERENCE
        try:
            return load_file(file) if file.is_file() else {}
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is damaged: {error}. Remove it, and it is computed again.") from None

    def _ask_reference(self, config: SheepOpConfig, device: str) -> None:
        """Computes them once for the whole run, and keeps them in it."""
        model = self.reference(config, device)
        splits = {"train": self.store.train, "validation": self.store.validation}
        total = sum(split.num_groups for split in splits.values())
        with self.console.progress("Reference", total, "groups") as progress:
            found = {
                name: log_probabilities_of(
                    model,
                    self._groups(split, config),
                    batch_size=evaluation_batch(config),
                    precision=config.training.precision,
                    device=device,
                    on_batch=progress.advance,
                )
                for name, split in splits.items()
            }
        with atomic_file(self.place / _REFERENCE) as file:
            save_file(found, file)


class RewardData(PreferenceData):
    """Pairs of a better and a worse answer, which a reward model learns to tell apart."""

    @staticmethod
    def row_type(config: SheepOpConfig) -> type[Row]:
        """Pairs."""
        return Preference

    @classmethod
    def needs_reference(cls, config: SheepOpConfig) -> bool:
        """Rewards are compared with nothing."""
        return False

    @staticmethod
    def fitted(config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
        """`config` as it is."""
        return config

    def objective(self, config: SheepOpConfig) -> Objective:
        """Bradley and Terry's loss."""
        return PairwiseReward(config.tuning.reward.center_rewards_coefficient, config.tuning.reward.margins)

    def network(self, config: SheepOpConfig, device: str) -> Transformer:
        """The model with a head for rewards; its output projection is not trained."""
        model = super().network(config, device)
        if not config.model.tie_weights:
            model.lm_head.requires_grad_(False)
        add_scalar_head(model, REWARD_HEAD)
        return model

    def scores(self, found: MeanLosses) -> Scores:
        """How many pairs are in the right order, and whether the model knows how sure it may be."""
        return reward_scores(found)

    def samples(self, model: Transformer, config: SheepOpConfig, device: str) -> Samples | None:
        """A reward model writes nothing."""
        return None

    def check(self, config: SheepOpConfig) -> None:
        """There are no prompts to check."""
        return

    def try_out(self, run: Path, config: SheepOpConfig) -> str:
        """Training a policy with it."""
        return typed("tune", "ppo", "MODEL", "--data", "prompts.jsonl", "--reward", run)


def without_dropout(config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
    """`config` without dropout; raises `ConfigError` where some was asked for."""
    lora: Any = config.tuning.lora
    is_given = asked.model.dropout not in (0, ModelConfig().dropout)
    if is_given or (lora is not None and lora.dropout):
        key = "model.dropout" if is_given else "tuning.lora.dropout"
        raise ConfigError(
            f"{key} is not for tune {config.tuning.method}: a policy is compared with itself, and dropout would be in "
            "the difference. Leave it out."
        )
    return config.replace(model={**config.model.model_dump(), "dropout": 0.0})
