"""A network that trains for a few steps in memory, on the batches of a real run, and is thrown away."""

from __future__ import annotations

import math

from sheepop.core.random import seed_torch
from sheepop.data import BatchSchedule, RowSource, SampleOrder
from sheepop.data.batch_schedule import Stages
from sheepop.jobs.run.resolve import build_network
from sheepop.jobs.task.interface import Task
from sheepop.train.budget import runner_here
from sheepop.train.precision import candidates, initial_loss_scale
from sheepop.train.source import ScheduledSource


class ThrowAway:
    """The initial network of a task whose settings are complete, and its steps; no step has a warm-up of its batch."""

    def __init__(self, task: Task, device: str) -> None:
        config, training, batches = task.config, task.config.training, task.batches()
        precision, size = candidates(training.precision, device)[-1], training.global_batch_size
        self.task, self.device = task, device
        self.model = build_network(task, device)
        task.begin(self.model)
        objective = task.objective()
        self._runner = runner_here(self.model, objective, training, precision, device)
        rows = RowSource(batches, SampleOrder(batches.num_samples, config.seed))
        schedule = BatchSchedule([rows], Stages((), size), Stages((), batches.max_length), config.seed)
        self._source = ScheduledSource(schedule, objective, training.micro_batch_size or size, device)
        self._taken, self._scale = 0, initial_loss_scale(precision)

    def step(self, rate: float) -> float:
        """Takes a step at this rate; returns the loss of its batch before it, in nats per token."""
        outcome = self._runner.take(
            self._source.prepare(self._taken),
            number=self._taken,
            rate=rate,
            loss_scale=self._scale.scale if self._scale else 1.0,
            before_forward=lambda number: seed_torch(self.task.config.seed, "throw-away", self._taken, number),
        )
        self._taken += 1
        if self._scale and math.isfinite(outcome.loss):
            self._scale = self._scale.after(finite=math.isfinite(outcome.norm))
        return outcome.loss

    def held_out_loss(self) -> float:
        """Returns the loss of the held-out rows that a run validates on; there must be some."""
        held_out, task = self.task.held_out(), self.task
        assert held_out is not None
        with self._runner.evaluation.applied(), self._runner.placement.evaluating():
            return task.score(self.model, held_out, self.device, max_tokens=task.config.training.eval_tokens).loss
