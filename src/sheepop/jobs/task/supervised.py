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
from sheepop.core.facts import counted, plural
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.interface import with_training
from sheepop.model import Transformer
from sheepop.posttrain.supervised import Distillation, NoisyEmbeddings
from sheepop.train.objective import Objective, with_experts

# A step whose size is chosen by tokens learns at most such a part of an epoch, and of the whole run.
_LEAST_STEPS, _LEAST_IN_ALL = 16, 100


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
        """The task with as many rows in a step as `tuning.batch_tokens` asks for; refuses a second size of a step."""
        wanted, training = self.config.tuning.batch_tokens, self.config.training
        if wanted is None:
            return self
        named = [key for key in ("global_batch_size", "batch_size_warmup") if key in (given.get("training") or {})]
        if named:
            raise ConfigError(f"training.{named[0]} and tuning.batch_tokens both say how large a step is. Give one.")
        learnt, count = self.store.train.num_supervised, self.rows(self.store.train).num_samples
        unit = math.lcm(num_ranks, training.micro_batch_size or 1)
        epochs = training.max_epochs or 1
        parts = max(_LEAST_STEPS, _LEAST_IN_ALL / epochs) if training.max_epochs else _LEAST_STEPS
        rows = max(1, round(min(wanted, learnt / parts) * count / learnt / unit)) * unit
        self.console.info(
            f"A step has {counted(rows, 'row')}, with about {rows * learnt / count:,.0f} tokens to learn."
        )
        steps = math.ceil(epochs * count / rows)
        others = (training.max_steps, training.max_tokens, training.max_minutes)
        if steps < _LEAST_IN_ALL and all(budget is None for budget in others):
            self.console.warn(
                f"{counted(count, 'row')} of examples make only {counted(steps, 'step')} in {epochs:g} "
                f"{plural(epochs, 'epoch')}, which may be too few to learn them: add examples, or set "
                f"training.max_steps={_LEAST_IN_ALL}."
            )
        return self.with_config(with_training(self.config, training.replace(global_batch_size=rows)))
