"""Post-training on answers: their cross-entropy, or what a teacher gives for them."""

from __future__ import annotations

from functools import cached_property

import torch

from sheepop.checkpoint import load_model
from sheepop.core.device import resolve_device
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.tuned_data import TunedData, require_same_tokens, row_length
from sheepop.model import Transformer
from sheepop.posttrain.supervised import Distillation, NoisyEmbeddings
from sheepop.train.expert_balance import with_experts
from sheepop.train.objective import OBJECTIVES, Objective


class SupervisedData(TunedData):
    """Answers, whose cross-entropy is learnt."""

    def check(self, config: SheepOpConfig) -> None:
        """Refuses a teacher of other tokens, too."""
        if config.tuning.teacher is not None:
            require_same_tokens(
                "tuning.teacher.model", config.tuning.teacher.model, self.tokenizer(), row_length(config)
            )
        super().check(config)

    def objective(self, config: SheepOpConfig) -> Objective:
        """The cross-entropy of the answers."""
        objective = with_experts(self._answers(config), config.model)
        alpha = config.tuning.neftune_noise_alpha
        return objective if alpha is None else NoisyEmbeddings(objective, alpha)

    def _answers(self, config: SheepOpConfig) -> Objective:
        """What is learnt of an answer: its tokens, or what a teacher gives for them."""
        teacher = config.tuning.teacher
        if teacher is None:
            return OBJECTIVES[config.training.objective](config.training)
        return Distillation(self._taught_by(teacher.model, config), teacher.weight, teacher.temperature)

    def _taught_by(self, path: str, config: SheepOpConfig) -> Transformer:
        """The teacher, read once."""
        if path not in self._teachers:
            found = load_model(path, resolve_device(config.device), torch.float32)
            self._teachers[path] = found.model.requires_grad_(False)
        return self._teachers[path]

    @cached_property
    def _teachers(self) -> dict[str, Transformer]:
        return {}
