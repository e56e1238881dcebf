"""The training loop: one life of a run, from its first step to its last, for every objective.

Now and then log, now and then validate, now and then sample, now and then save, and one step at a time. A signal may
come anywhere: what can be done again is left at once, what cannot is finished, and everything is saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from sheepop.core.console import Console, Progress
from sheepop.core.errors import DataError, Interrupted, TrainingError
from sheepop.core.interrupts import Interruption, StopRequestedError, catch_interrupts
from sheepop.core.random import seed_torch
from sheepop.data import StepPlan
from sheepop.model import Transformer
from sheepop.train.config import ResolvedTraining, TrainingConfig
from sheepop.train.early_stopping import EarlyStopping
from sheepop.train.evaluation_weights import EvaluationWeights
from sheepop.train.live_view import LiveView, measured_peak
from sheepop.train.loss_scale import initial_loss_scale
from sheepop.train.metrics import VERIFICATION, JsonLines
from sheepop.train.network import Network
from sheepop.train.objective import NextToken, Objective, StepLoss
from sheepop.train.optimizers import clip_gradients, set_learning_rate, unscale_gradients
from sheepop.train.prefetch import Prefetch
from sheepop.train.profiler import AroundStep, unobserved
from sheepop.train.rescue import Rescue
from sheepop.train.schedule import Schedule
from sheepop.train.sinks import Sink
from sheepop.train.state import Checkpointer, TrainingState
from sheepop.train.step import PreparedStep, accumulate_gradients, apply_gradients
from sheepop.train.throughput import Throughput
from sheepop.train.trouble import find_trouble
from sheepop.train.validation import Scores
from sheepop.train.verification import Recomputation

MILESTONES = (0.10, 0.25, 0.50)
VALIDATE, SAMPLE, SAVE = "validate", "sample", "save"


@dataclass
class Trainer:
    """A run about to start or go on. `validate`, `sample` and `describe` are handed in by whoever owns those stages.

    `describe` names the documents of a batch. With `saves_the_beginning` there is a checkpoint of step 0.
    `flops_per_token`, by the length of a row, and `peak_flops` give the metric ``mfu``: the share of the machine's
    measured matrix peak that the model's own arithmetic uses.
    """

    model: Transformer
    network: Network  # the model as training steps run it
    optimizers: Sequence[torch.optim.Optimizer]
    evaluation: EvaluationWeights  # what is validated, sampled from and saved as the model
    plan: StepPlan
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
    flops_per_token: Callable[[int], float]
    peak_flops: float
    state: TrainingState = field(default_factory=TrainingState)
    objective: Objective = field(default_factory=NextToken)
    sinks: Sequence[Sink] = ()
    around_step: AroundStep = unobserved
    console: Console = field(default_factory=Console.silent)
    describe: Callable[[int], list[str]] = lambda number: []
    saves_the_beginning: bool = False

    def __post_init__(self) -> None:
        self._prefetch = Prefetch(self._prepare, self.config.prefetch)
        if self.state.loss_scale is None:
            self.state = self.state.after(loss_scale=initial_loss_scale(self.resolved.precision))

    def run(self) -> TrainingState:
        """Trains to the last step, or until patience ends.

        Raises `Interrupted`, with everything saved, when a signal asks for an end, and `TrainingError`, with
        everything saved, when the numbers are in trouble and the policy is to stop.
        """
        total = self.resolved.total_steps
        self._rescue = Rescue(self.config.trouble, self.checkpointer, self.console, self.describe)
        self._saved: TrainingState | None = self.state if self.state.step else None
        self._resumed_seconds, self._started = self.state.seconds, time.monotonic()
        self._throughput = Throughput(self.flops_per_token, self.peak_flops)
        with (
            catch_interrupts() as interruption,
            self._prefetch,
            self.console.progress("Training", total, "steps", done=self.state.step) as progress,
            closing(self.checkpointer),
        ):
            peak = measured_peak(self.peak_flops, self.resolved.precision)
            self._view = LiveView(progress, total, self.state.step, peak, self.device, self.state.best)
            self._prune(self.state.step)  # which a kill may have kept from being done
            self._save_the_beginning()
            try:
                self._do_what_is_due(interruption)
                while self.state.step < total and not self._early_stopping.is_over(self.state):
                    with self.around_step(self.state.step):
                        self._step(interruption, progress)
                    self._do_what_is_due(interruption)
            except StopRequestedError:
                self.save()
            except (DataError, TrainingError):
                self.save()
                self.checkpointer.wait()
                raise
            self.checkpointer.wait()
        if interruption.signal_number is not None:
            raise Interrupted(
                f"Stopped after step {self.state.step:,} of {total:,}; everything is saved in "
                f"{self.checkpointer.run.path}.",
                interruption.signal_number,
            )
        if self.state.step < total:
            self.console.info(
                f"Stopped early after step {self.state.step:,} of {total:,}: "
                f"{self.state.stale_validations} validations in a row brought no improvement."
            )
        return self.state

    def _step(self, interruption: Interruption, progress: Progress) -> None:
        """One optimizer step over the global batch, unless its numbers are in trouble."""
        self.checkpointer.check()
        every = self.config.verify_interval
        is_verified = every is not None and (self.state.step + 1) % every == 0
        recomputation = Recomputation(self.model) if is_verified else None
        with interruption.leaving():
            prepared = self._prefetch.take(self.state.batch_number)
            assert prepared is not None  # nothing asks the wait for data to stop
            losses, norm = self._gradients(prepared, recomputation)
        if recomputation is not None and recomputation.differences:
            self._report_corruption(recomputation.differences)  # only now: a step that is left is taken again
        objective, _ = losses.means()
        scale = self.state.loss_scale
        if scale:
            is_finite = math.isfinite(norm)
            self.state = self.state.after(loss_scale=scale.after(finite=is_finite))
            if math.isfinite(objective) and not is_finite:
                self._pass_over(losses, norm, prepared, progress)
                return
        trouble = find_trouble(objective, norm, self.state.window, self.config.trouble)
        if trouble is not None:
            self.model.zero_grad(set_to_none=True)
            before = self.state.step
            self.state = self._rescue.meet(trouble, self.state, self)
            if self.state.step > before:
                self.state = self.state.after(due=self._due_after(self.state.step))
            progress.advance(self.state.step - before)
            return
        set_learning_rate(self.optimizers, self.schedule(self.state.step))
        apply_gradients(self.optimizers)
        self.objective.step_taken(self.network, losses)
        self.evaluation.update(self.state.step)
        step = self.state.step + 1
        self.state = self.state.after(
            step=step,
            tokens=self.state.tokens + prepared.num_tokens,
            window=self.state.window.after(objective, norm, self.config.trouble.window),
            skips_in_a_row=0,
            due=self._due_after(step),
        )
        self._finish_step(losses, norm, prepared, progress)

    def _finish_step(self, losses: StepLoss, norm: float, prepared: PreparedStep, progress: Progress) -> None:
        self._throughput.count(prepared)
        if self.state.step % self.config.log_interval == 0 or self.state.step == self.resolved.total_steps:
            self._log(losses, norm, prepared.batch_hash)
        progress.advance()

    def _pass_over(self, losses: StepLoss, norm: float, prepared: PreparedStep, progress: Progress) -> None:
        """Takes a step whose scaled gradients overflowed as done, without changing the weights."""
        self.model.zero_grad(set_to_none=True)
        step = self.state.step + 1
        self.state = self.state.after(
            step=step, tokens=self.state.tokens + prepared.num_tokens, due=self._due_after(step)
        )
        self._finish_step(losses, norm, prepared, progress)

    def _gradients(self, prepared: PreparedStep, recomputation: Recomputation | None = None) -> tuple[StepLoss, float]:
        """Puts the clipped gradient of a step into the parameters; its losses and the norm before clipping."""
        step = self.state.step
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        scale = self.state.loss_scale
        losses = accumulate_gradients(
            self.network,
            self.objective,
            prepared,
            loss_scale=scale.scale if scale else 1.0,
            before_forward=lambda number: seed_torch(self.seed, "dropout", step, number),
            recomputation=recomputation,
        )
        if scale:
            unscale_gradients(self.model.parameters(), scale.scale)
        return losses, clip_gradients(self.model.parameters(), self.config.max_grad_norm).item()

    def _do_what_is_due(self, interruption: Interruption) -> None:
        """Validates, samples and saves; what a signal leaves undone is remembered with the state."""
        while self.state.due:
            name, *rest = self.state.due
            if name == SAVE:
                self.state = self.state.after(due=tuple(rest))
                self.save()
                continue
            # Taking the weights in and out is never left half done.
            with self.evaluation.applied(), interruption.leaving():
                finish = self._validated() if name == VALIDATE else self._sampled()
            self.state = self.state.after(due=tuple(rest))
            finish()

    def _due_after(self, step: int) -> tuple[str, ...]:
        """What is to be done after a step, in this order."""

        def is_due(interval: int) -> bool:
            return step % interval == 0 or step == self.resolved.total_steps

        names = {
            VALIDATE: self.validate is not None and is_due(self.resolved.eval_interval),
            SAMPLE: is_due(self.resolved.sample_interval),
            SAVE: is_due(self.resolved.checkpoint_interval) or step in self._milestones(),
        }
        return tuple(name for name, due in names.items() if due)

    def _prepare(self, step: int) -> PreparedStep:
        """The batch of a step as micro-batches; those of shorter rows have more of them, and as many tokens."""
        batch = self.plan.batch(step)
        rows = self.resolved.micro_batch_size * self.plan.pieces(step)
        return PreparedStep.of(batch, rows, self.objective, device=self.device, hashed=self.config.log_batch_hash)

    def _log(self, losses: StepLoss, norm: float, batch_hash: str | None) -> None:
        tokens_per_second, mfu = self._throughput.take()
        self._write(
            split="train",
            loss=losses.means()[1],
            learning_rate=self.schedule(self.state.step - 1),
            grad_norm=norm,
            tokens=self.state.tokens,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            seconds=self._seconds(),
            **self.objective.metrics(losses),
            **self._scale_metrics(),
            **({"batch_hash": batch_hash} if batch_hash is not None else {}),
        )

    def _scale_metrics(self) -> dict[str, float]:
        scale = self.state.loss_scale
        return {"loss_scale": scale.scale, "skipped_steps": scale.skipped_steps} if scale else {}

    def _validated(self) -> Callable[[], None]:
        """Scores the held-out text; what is returned writes the scores down and remembers the best."""
        assert self.validate is not None
        with self._throughput.paused():
            scores = self.validate()

        def finish() -> None:
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
            best = self.state.best_loss
            if scores.loss < (math.inf if best is None else best):  # a loss that is no number is never the best
                due = (*self.state.due, *([] if SAVE in self.state.due else [SAVE]))
                self.state = self.state.after(best_loss=scores.loss, best_step=self.state.step, due=due)
            self.state = self._early_stopping.after(self.state, scores.loss)
            if self._early_stopping.is_over(self.state) and SAVE not in self.state.due:
                self.state = self.state.after(due=(*self.state.due, SAVE))

        return finish

    def _sampled(self) -> Callable[[], None]:
        """Lets the model write; what is returned writes it down."""
        with self._throughput.paused():
            rows = self.sample(self.state.step)

        def finish() -> None:
            for row in rows:
                self.samples.append({"step": self.state.step, **row})
                self._view.sampled({"step": self.state.step, **row})
                self.console.info(f"  {row['prompt']!r} -> {row['text']!r}")

        return finish

    def save(self) -> None:
        """Starts writing a checkpoint of everything as it is now, unless that is written already."""
        if self._saved is not None and self._saved == self.state:
            return
        self.state = self.state.after(
            seconds=self._seconds(), metrics_bytes=self.metrics.length, samples_bytes=self.samples.length
        )
        state, run = self.state, self.checkpointer.run

        def finish_logs() -> None:
            self.metrics.sync()
            self.samples.sync()

        def finish_pointers() -> None:
            if state.best_step == state.step:
                run.mark_best(state.step)
            self._prune(state.step)

        with self._throughput.paused():
            self.checkpointer.save(state, before=finish_logs, after=finish_pointers)
        self._saved = state

    def _prune(self, newest: int) -> None:
        self.checkpointer.run.prune(newest, self.config.keep_checkpoints, self._milestones())

    def go_back(self, step: int) -> TrainingState:
        """Restores the checkpoint of `step`; the logs are cut to what they were then, and later checkpoints go."""
        state = self.checkpointer.load(step)
        self.checkpointer.run.mark_latest(step)
        self.checkpointer.run.forget_after(step)
        state = self.checkpointer.with_best(state, self.console.warn)
        # What the steps to come will not say again: the batches that stay left out, and what the machine did wrong.
        self.metrics.cut(state.metrics_bytes, lambda row: row["split"] == VERIFICATION or row.get("policy") == "rewind")
        self.samples.cut(state.samples_bytes)
        self._throughput.restart()
        self._view.best = state.best
        return state

    @property
    def _early_stopping(self) -> EarlyStopping:
        return EarlyStopping(self.config.early_stopping, self.config.early_stopping_delta)

    def write_trouble(self, row: dict[str, Any]) -> None:
        """Writes down a step that was not taken."""
        self._write(split="trouble", **row)

    def _save_the_beginning(self) -> None:
        """Where a run may have to go back to it, or its weights are not made of the seed, step 0 is a checkpoint."""
        trouble = self.config.trouble
        may_go_back = "rewind" in (trouble.non_finite, trouble.spike)
        if (may_go_back or self.saves_the_beginning) and not self.checkpointer.run.steps():
            self.save()

    def _report_corruption(self, differences: list[str]) -> None:
        """Says what differed between two computations of one micro-batch; the run goes on."""
        step = self.state.step + 1
        row = {"step": self.state.step, "split": VERIFICATION, "differences": differences}
        if row not in self.metrics.kept:  # of a step that is taken anew
            self._write(**row)
        self.console.warn(
            f"Step {step:,}: a micro-batch gave other bits when it was computed again, in {len(differences):,} places: "
            f"{'; '.join(differences[:3])}. Memory or processor may be faulty; on a GPU some operations are only "
            "repeatable with deterministic=true."
        )

    def _milestones(self) -> set[int]:
        return {math.ceil(self.resolved.total_steps * share) for share in MILESTONES}

    def _write(self, **row: Any) -> None:
        row = {"step": self.state.step, **row}
        self.metrics.append(row)
        self._view.heard(row)
        for sink in self.sinks:
            sink.write(row)

    def _seconds(self) -> float:
        return self._resumed_seconds + time.monotonic() - self._started
