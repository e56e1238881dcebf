"""On-policy distillation: a model learns from what a teacher thinks of the model's own answers (GKD)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint import load_model
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.data import Batches
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.rewards import RolloutTask
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import DistillConfig
from sheepop.posttrain.policy import RewardScores
from sheepop.posttrain.reward_methods import RewardMethod
from sheepop.posttrain.rewards import Written
from sheepop.posttrain.rollouts import padded
from sheepop.posttrain.supervised import Distillation
from sheepop.train import Scores
from sheepop.train.objective import Objective, with_experts
from sheepop.train.precision import autocast, working_dtype
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork


class _AllAnswers(RewardMethod):
    """Learns from all answers alike."""

    def advantages(self, written: Written) -> list[float | None]:
        return [0.0] * len(written)

    def numbers(
        self, written: Written, mask: Tensor, log_p: Tensor | None, reference: Tensor | None, values: Tensor | None
    ) -> dict[str, Tensor]:
        return {}


class DistillTask(RolloutTask):
    """The divergence from a teacher on the model's own answers.

    Agarwal et al. 2023 (GKD, "On-Policy Distillation of Language Models"), algorithm 1 with lambda 1; as there, no
    gradient passes through the sampling.
    """

    @property
    def settings(self) -> DistillConfig:
        """The settings under `tuning.distill`."""
        return self.config.tuning.distill

    @property
    def answers(self) -> int:
        """The answers to a prompt: one."""
        return 1

    def method(self) -> RewardMethod:
        """Learns from all answers."""
        return _AllAnswers()

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """Also refuses settings without a teacher."""
        if self.settings.teacher is None:
            raise ConfigError("There is no teacher. Give one with the same tokenizer: tuning.distill.teacher=MODEL.")
        return super().fitted(given)

    def check(self) -> None:
        """Also refuses a teacher with another tokenizer."""
        assert self.settings.teacher is not None
        self.require_same_tokens("tuning.distill.teacher", self.settings.teacher)
        super().check()

    def objective(self) -> Objective:
        """The divergence from the teacher."""
        return with_experts(self._distillation, self.config.model)

    @cached_property
    def _distillation(self) -> Distillation:
        settings: DistillConfig = self.settings
        assert settings.teacher is not None
        dtype = working_dtype(self.config.training.precision) or torch.float32
        teacher = load_model(settings.teacher, resolve_device(self.config.device), dtype).model.requires_grad_(False)
        return Distillation(teacher, 1.0, settings.temperature, settings.beta)

    @torch.no_grad()
    def score(
        self, model: Transformer, held_out: Batches, device: str, *, ranks: Ranks = ALONE, **options: Any
    ) -> Scores:
        """The mean divergence from the teacher, in nats per token, on answers to held-out prompts."""
        found = self.held_out_answers(model, held_out, ranks=ranks, **options)
        batch, size = padded(found, self.tokenizer().filler_id), self.evaluation_batch
        total = torch.zeros(1, dtype=torch.float64)
        for start in range(ranks.rank * size, len(found), ranks.size * size):
            rows = TensorBatch.from_numpy(batch.rows(slice(start, start + size)), device)
            with autocast(device, self.config.training.precision):
                sums = self._distillation.loss_sums(FinishedNetwork(model), rows)
            total += sums.measured["divergence_from_teacher"].double().cpu()
        mean = float(ranks.total(total)) / max(1, batch.num_labels)
        return RewardScores.of(mean, found.metrics(), len(found))
