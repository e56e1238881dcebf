"""Supervised fine-tuning on answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import torch

from sheepop.checkpoint import load_model
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.interface import with_training
from sheepop.model import Transformer
from sheepop.posttrain.supervised import Distillation, NoisyEmbeddings
from sheepop.train.objective import Objective, with_experts

# A step learns at most this part of an epoch, if its size is chosen by tokens.
_LEAST_STEPS = 16


class SupervisedTask(ExampleTask):
    """Supervised fine-tuning on answers, or distillation from a teacher."""

    def check(self) -> None:
        """Also refuses a teacher with another tokenizer."""
        if self.config.tuning.teacher is not None:
            self.require_same_tokens("tuning.teacher.model", self.config.tuning.teacher.model)
        super().check()

    def objective(self) -> Objective:
        """The cross-entropy of the answers, or distillation from `tuning.teacher`; with NEFTune if set."""
        teacher, alpha = self.config.tuning.teacher, self.config.tuning.neftune_noise_alpha
        objective = super().objective()
        if teacher is not None:
            distillation = Distillation(self._teacher, teacher.weight, teacher.temperature)
            objective = with_experts(distillation, self.config.model)
        return objective if alpha is None else NoisyEmbeddings(objective, alpha)

    @cached_property
    def _teacher(self) -> Transformer:
        teacher = self.config.tuning.teacher
        assert teacher is not None
        return load_model(teacher.model, resolve_device(self.config.device), torch.float32).model.requires_grad_(False)

    def with_batch(self, given: Mapping[str, Any], num_ranks: int = 1) -> Self:
        """The task with as many rows in a step as `tuning.batch_tokens` asks for; refuses another size beside that."""
        wanted, training = self.config.tuning.batch_tokens, self.config.training
        if wanted is None:
            return self
        named = [key for key in ("global_batch_size", "batch_size_warmup") if key in (given.get("training") or {})]
        if named:
            raise ConfigError(f"training.{named[0]} and tuning.batch_tokens both say how large a step is. Give one.")
        learnt, count = self.store.train.num_supervised, self.rows(self.store.train).num_samples
        unit = math.lcm(num_ranks, training.micro_batch_size or 1)
        rows = max(1, round(min(wanted, learnt / _LEAST_STEPS) * count / learnt / unit)) * unit
        self.console.info(
            f"A step has {counted(rows, 'row')}, with about {rows * learnt / count:,.0f} tokens to learn."
        )
        return self.with_config(with_training(self.config, training.replace(global_batch_size=rows)))
