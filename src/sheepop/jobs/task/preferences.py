"""Post-training on preferences: the DPO family, and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head
from sheepop.core.errors import ConfigError, DataError
from sheepop.core.files import atomic_file
from sheepop.core.program import typed
from sheepop.data import Batches
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.examples import ExampleTask
from sheepop.model import Transformer
from sheepop.posttrain.config import REFERENCE_FREE
from sheepop.posttrain.example_batches import ExampleRows, GroupedExamples
from sheepop.posttrain.example_store import ExampleSplit, ExampleStore
from sheepop.posttrain.preference import (
    JudgedAnswers,
    PairwisePreference,
    PairwiseReward,
    PreferenceLoss,
    PreferenceScores,
    log_probabilities_of,
    reward_scores,
)
from sheepop.posttrain.rows import Judged, Preference, Row
from sheepop.train import Scores
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.source import StepSource
from sheepop.train.validation import MeanLosses, mean_losses

_REFERENCE = "reference_log_probabilities.safetensors"


class PreferenceTask(ExampleTask):
    """Preference training on pairs of a chosen and a rejected answer, or on answers judged one by one (KTO)."""

    @property
    def row_type(self) -> type[Row]:
        """Lines with a pair of answers; for KTO, with one judged answer."""
        return Judged if "kto" in self.config.tuning.dpo.losses else Preference

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a reference model."""
        return not self.config.tuning.dpo.losses.keys() <= set(REFERENCE_FREE)

    @property
    def keeps_base(self) -> bool:
        """Whether the initial model is the reference."""
        return self.needs_reference and self.config.tuning.reference is None

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """The settings without dropout, which would make the policy differ from its reference at random."""
        return without_dropout(self.config, given)

    def needed_length(self, store: ExampleStore) -> int:
        """The tokens of the longest answer with its prompt; groups are not packed."""
        return store.longest

    def describe(self) -> str:
        """The number of pairs or judged answers."""
        train, held_out = self.store.train, self.store.validation
        what = "pairs" if train.group_size == 2 else "judged answers"
        return f"{train.num_groups:,} {what} of {train.num_tokens:,} tokens; {held_out.num_groups:,} held out"

    def rows(self, split: ExampleSplit) -> ExampleRows:
        """Groups of answers with their log-probabilities under the reference.

        Until these are computed, when steps are measured, they are zeros.
        """
        groups = self._groups(split)
        if not self.needs_reference:
            return groups
        unknown = np.zeros((split.num_groups, 2), np.float32)
        return groups.with_reference(self._references().get(self._name(split), unknown))

    def objective(self) -> Objective:
        """The losses that `tuning.dpo.loss_type` names."""
        dpo = self.config.tuning.dpo
        if "kto" in dpo.losses:
            return JudgedAnswers(dpo.beta, (dpo.desirable_weight, dpo.undesirable_weight))
        parts = [
            (weight, PreferenceLoss(kind, dpo.beta, dpo.label_smoothing, dpo.margin))
            for kind, weight in dpo.losses.items()
        ]
        return PairwisePreference(parts, dpo.supervised_weight)

    def source(self, objective: Objective, placement: Placement) -> StepSource:
        """The batches of the schedule, after the reference has scored their answers."""
        if self.needs_reference and not self._references():
            self._score_with_reference(placement.device)
            self.__dict__.pop("schedule", None)  # which was built with zeros
        return super().source(objective, placement)

    def score(self, model: Transformer, held_out: Batches, device: str, **options: Any) -> Scores:
        """The same loss on held-out answers, with its metrics."""
        batch_size, precision = self.evaluation_batch, self.config.training.precision
        return self.scores(
            mean_losses(
                model, self.objective(), held_out, batch_size=batch_size, precision=precision, device=device, **options
            )
        )

    def scores(self, found: MeanLosses) -> Scores:
        """The share of answers in the right order, and other metrics."""
        return PreferenceScores.of(found)

    def _groups(self, split: ExampleSplit) -> GroupedExamples:
        return GroupedExamples(
            split,
            max_length=self.row_length,
            pad_id=self.tokenizer().filler_id,
            mismatched=self.row_type is Judged,
        )

    def _name(self, split: ExampleSplit) -> str:
        return "train" if split is self.store.train else "validation"

    def _references(self) -> dict[str, NDArray[np.float32]]:
        """Log-probabilities (groups, 2) under the reference by split; empty until they are computed."""
        file = self.directory / _REFERENCE
        try:
            return load_file(file) if file.is_file() else {}
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is damaged: {error}. Remove it, and it is computed again.") from None

    def _score_with_reference(self, device: str) -> None:
        """Computes the log-probabilities under the reference once and keeps them in the run."""
        model = self.reference(device)
        splits = {"train": self.store.train, "validation": self.store.validation}
        total = sum(split.num_groups for split in splits.values())
        with self.console.progress("Reference", total, "groups") as progress:
            found = {
                name: log_probabilities_of(
                    model,
                    self._groups(split),
                    batch_size=self.evaluation_batch,
                    precision=self.config.training.precision,
                    device=device,
                    on_batch=progress.advance,
                )
                for name, split in splits.items()
            }
        with atomic_file(self.directory / _REFERENCE) as file:
            save_file(found, file)


class RewardTask(PreferenceTask):
    """Training a reward model to prefer the better of two answers."""

    @property
    def row_type(self) -> type[Row]:
        """Lines with a pair of answers."""
        return Preference

    @property
    def needs_reference(self) -> bool:
        """A reward model has no reference."""
        return False

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """The settings as they are."""
        return self.config

    def objective(self) -> Objective:
        """The Bradley-Terry loss."""
        return PairwiseReward(self.config.tuning.reward.center_rewards_coefficient, self.config.tuning.reward.margins)

    def network(self, device: str) -> Transformer:
        """The model with a reward head; its output projection is not trained."""
        model = super().network(device)
        if not self.config.model.tie_weights:
            model.lm_head.requires_grad_(False)
        add_scalar_head(model, REWARD_HEAD)
        return model

    def scores(self, found: MeanLosses) -> Scores:
        """The share of pairs in the right order, and how well the model is calibrated."""
        return reward_scores(found)

    def sample_prompts(self) -> list[list[int]]:
        """A reward model writes nothing."""
        return []

    def try_out(self) -> str:
        """Training a policy with the reward model."""
        return typed("tune", "ppo", "MODEL", "--data", "prompts.jsonl", "--reward", self.run.path)


def without_dropout(config: SheepOpConfig, given: Mapping[str, Any]) -> SheepOpConfig:
    """`config` without dropout; raises `ConfigError` if the user gave some."""
    named, lora = (given.get("model") or {}).get("dropout"), config.tuning.lora
    if named or (lora is not None and lora.dropout):
        key = "model.dropout" if named else "tuning.lora.dropout"
        raise ConfigError(
            f"{key} is not for tune {config.tuning.method}: a policy is compared with itself, and dropout would be in "
            "the difference. Leave it out."
        )
    return config.replace(model={**config.model.model_dump(), "dropout": 0.0})
