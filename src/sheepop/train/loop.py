"""The training loop: one life of a run, from its first step to its last, for every objective.

Now and then log, now and then validate, now and then sample, now and then save, and one step at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sheepop.core.console import Console, Progress
from sheepop.core.errors import Interrupted, SheepOpError
from sheepop.core.random import seed_torch
from sheepop.data import Batches, SampleOrder
from sheepop.model import Transformer
from sheepop.train.config import ResolvedTraining, TrainingConfig
from sheepop.train.interrupt import catch_interrupts
from sheepop.train.metrics import JsonLines, Sink
from sheepop.train.network import Network
from sheepop.train.objective import NextToken, Objective
from sheepop.train.optimizer import clip_gradients, set_learning_rate
from sheepop.train.schedule import Schedule
from sheepop.train.state import Checkpointer, TrainingState
from sheepop.train.step import accumulate_gradients, apply_gradients
from sheepop.train.validation import Scores

MILESTONES = (0.10, 0.25, 0.50)


class TrainingError(SheepOpError):
    """Training cannot go on: the numbers stopped being numbers."""


@dataclass
class Trainer:
    """A run about to start or go on. `validate` and `sample` are handed in by whoever owns those stages.

    `flops_per_token` and `peak_flops` give the metric ``mfu``: the share of the machine's measured matrix peak
    that the model's own arithmetic uses.
    """

    model: Transformer
    network: Network  # the model as training steps run it
    optimizers: Sequence[torch.optim.Optimizer]
    batches: Batches
    order: SampleOrder
    config: TrainingConfig
    resolved: ResolvedTraining
    schedule: Schedule
    checkpointer: Checkpointer
    metrics: JsonLines
    samples: JsonLines
    validate: Callable[[], Scores] | None  # None when nothing is held out
    sample: Callable[[int], list[dict[str, Any]]]
    device: str
    seed: int
    flops_per_token: float
    peak_flops: float
    state: TrainingState = field(default_factory=TrainingState)
    objective: Objective = field(default_factory=NextToken)
    sinks: Sequence[Sink] = ()
    console: Console = field(default_factory=Console.silent)

    def run(self) -> TrainingState:
        """Trains to the last step; raises `Interrupted`, with everything saved, when a signal asks for an end."""
        total = self.resolved.total_steps
        self._resumed_seconds, self._started = self.state.seconds, time.monotonic()
        self._log_mark = (time.monotonic(), self.state.tokens)
        with (
            catch_interrupts() as interrupt,
            self.console.progress("Training", total, "steps") as progress,
        ):
            progress.advance(self.state.step)
            while self.state.step < total:
                loss, objective, norm = self._step(self.state.step)
                step = self.state.step
                if step % self.config.log_interval == 0 or step == total:
                    self._log(loss, objective, norm, progress)
                improved = self._validate() if self._due(self.resolved.eval_interval) else False
                if self._due(self.resolved.sample_interval):
                    self._sample()
                # Asked once, so that a signal never ends the run at a step that was not saved.
                stopping = bool(interrupt)
                if improved or self._checkpoint_due() or stopping:
                    self._save(improved)
                progress.advance()
                if stopping:
                    break
        if interrupt.signal_number is not None:
            raise Interrupted(
                f"Stopped after step {self.state.step:,} of {total:,}; everything is saved in "
                f"{self.checkpointer.run.path}.",
                interrupt.signal_number,
            )
        return self.state

    def _step(self, step: int) -> tuple[float, float, float]:
        """One optimizer step over the global batch.

        Returns its mean cross-entropy, the mean of what was minimised, and the gradient norm before clipping.
        """
        self.model.train()
        size = self.config.global_batch_size
        losses = accumulate_gradients(
            self.network,
            self.objective,
            self.batches,
            self.order.indices(step * size, size),
            self.resolved.micro_batch_size,
            before_forward=lambda number: seed_torch(self.seed, "dropout", step, number),
        )
        norm = clip_gradients(self.model.parameters(), self.config.max_grad_norm).item()
        objective, loss = losses.means()
        if not (math.isfinite(objective) and math.isfinite(norm)):
            raise TrainingError(
                f"Step {step + 1} gave loss {objective} and gradient norm {norm}. The checkpoints before it are "
                "intact; lower training.learning_rate or raise training.warmup_steps and start again."
            )
        set_learning_rate(self.optimizers, self.schedule(step))
        apply_gradients(self.optimizers)
        self.state = self.state.after(step=step + 1, tokens=self.state.tokens + losses.num_tokens)
        return loss, objective, norm

    def _log(self, loss: float, objective: float, norm: float, progress: Progress) -> None:
        now = time.monotonic()
        before, tokens_before = self._log_mark
        speed = (self.state.tokens - tokens_before) / max(now - before, 1e-9)
        self._log_mark = (now, self.state.tokens)
        rate = self.schedule(self.state.step - 1)
        self._write(
            split="train",
            loss=loss,
            **({"objective": objective} if self.config.z_loss or self.config.label_smoothing else {}),
            learning_rate=rate,
            grad_norm=norm,
            tokens=self.state.tokens,
            tokens_per_second=speed,
            mfu=speed * self.flops_per_token / self.peak_flops,
            seconds=self._seconds(),
        )
        progress.describe(f"loss {loss:.3f}  lr {rate:.2e}  norm {norm:.2f}  {speed:,.0f} tokens/s")

    def _validate(self) -> bool:
        """Writes the scores of the held-out text; true when they are the best so far."""
        if self.validate is None:
            return False
        started = time.monotonic()
        scores = self.validate()
        self._write(
            split="validation",
            loss=scores.loss,
            perplexity=scores.perplexity,
            accuracy=scores.accuracy,
            bits_per_byte=scores.bits_per_byte,
            tokens=self.state.tokens,
            seconds=self._seconds(),
        )
        self.console.info(f"Step {self.state.step:,}: held out {scores}")
        self._leave_out(time.monotonic() - started)
        if self.state.best_loss is not None and scores.loss >= self.state.best_loss:
            return False
        self.state = self.state.after(best_loss=scores.loss, best_step=self.state.step)
        return True

    def _sample(self) -> None:
        """Writes what the model says at this step."""
        started = time.monotonic()
        for row in self.sample(self.state.step):
            self.samples.append({"step": self.state.step, **row})
            self.console.info(f"  {row['prompt']!r} -> {row['text']!r}")
        self._leave_out(time.monotonic() - started)

    def _save(self, improved: bool) -> None:
        """Writes a checkpoint that knows how long the logs were, then moves the pointers, then prunes."""
        started = time.monotonic()
        self.state = self.state.after(
            seconds=self._seconds(), metrics_bytes=self.metrics.sync(), samples_bytes=self.samples.sync()
        )
        self.checkpointer.save(self.state)
        if improved:
            self.checkpointer.run.mark_best(self.state.step)
        self.checkpointer.run.prune(self.state.step, self.config.keep_checkpoints, self._milestones())
        self._leave_out(time.monotonic() - started)

    def _due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.resolved.total_steps

    def _checkpoint_due(self) -> bool:
        return self._due(self.resolved.checkpoint_interval) or self.state.step in self._milestones()

    def _milestones(self) -> set[int]:
        return {math.ceil(self.resolved.total_steps * share) for share in MILESTONES}

    def _write(self, **row: Any) -> None:
        row = {"step": self.state.step, **row}
        self.metrics.append(row)
        for sink in self.sinks:
            sink.write(row)

    def _seconds(self) -> float:
        return self._resumed_seconds + time.monotonic() - self._started

    def _leave_out(self, seconds: float) -> None:
        """Keeps time that was not spent on steps out of the tokens per second."""
        since, tokens = self._log_mark
        self._log_mark = (since + seconds, tokens)
