"""The intervals of logging, validations, evaluations, samples and checkpoints, and the end of a run."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from sheepop.train.config import ResolvedTraining, TrainingConfig
from sheepop.train.counters import TrainingState
from sheepop.train.schedule import Pace

VALIDATE, EVALUATE, SAMPLE, SAVE = "validate", "evaluate", "sample", "save"
MILESTONES = (0.10, 0.25, 0.50)  # shares of the steps whose checkpoints are kept


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose held-out loss no longer falls (Prechelt 1998).

    It ends after `patience` validations in a row without improvement, or never with None. An improvement is a loss more
    than `delta` nats per token below that of the last improvement. The counters are part of the training state, so that
    a resumed run ends at the same step as an uninterrupted one.
    """

    patience: int | None = None
    delta: float = 0.0

    def after(self, state: TrainingState, loss: float) -> TrainingState:
        """The state after one more validation; NaN is no improvement."""
        reference = state.reference_loss
        if loss < (math.inf if reference is None else reference - self.delta):
            return state.after(reference_loss=loss, stale_validations=0)
        return state.after(stale_validations=state.stale_validations + 1)

    def is_over(self, state: TrainingState) -> bool:
        """Whether `patience` validations in a row brought no improvement."""
        return self.patience is not None and state.stale_validations >= self.patience


@dataclass(frozen=True)
class Agenda:
    """The intervals of a run in steps, None for never. Everything but verification is also due after the last step.

    Those in `paced` are in steps of the plan, as the milestones are: they follow it when the pace changes.
    """

    pace: Pace
    log_interval: int
    eval_interval: int | None
    sample_interval: int
    checkpoint_interval: int
    verify_interval: int | None = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    evaluation_interval: int | None = None
    paced: frozenset[str] = frozenset()
    keeps_milestones: bool = True

    @classmethod
    def of(
        cls,
        config: TrainingConfig,
        resolved: ResolvedTraining,
        *,
        validates: bool,
        evaluates: bool = False,
        evaluation_interval: int | None = None,
    ) -> Agenda:
        """The agenda of a configuration; `validates` is false without held-out text.

        Evaluations without an `evaluation_interval` come with validations.
        """
        paced = frozenset[str](config.paced_intervals)
        if evaluation_interval is None and "eval_interval" in paced:
            paced |= {"evaluation_interval"}
        return cls(
            resolved.pace,
            config.log_interval,
            resolved.eval_interval if validates else None,
            resolved.sample_interval,
            resolved.checkpoint_interval,
            config.verify_interval,
            EarlyStopping(config.early_stopping, config.early_stopping_delta),
            (evaluation_interval or resolved.eval_interval) if evaluates else None,
            paced,
            config.keep_milestones,
        )

    @property
    def total_steps(self) -> int:
        """The steps of the run by its current pace."""
        return self.pace.total_steps

    @property
    def milestones(self) -> set[int]:
        """The steps whose checkpoints are never deleted."""
        place = self.pace.place
        return {bisect_left(range(self.total_steps), float(kept), key=place) for kept in self._kept_places}

    @property
    def _kept_places(self) -> tuple[int, ...]:
        return tuple(math.ceil(self.pace.planned * share) for share in MILESTONES if self.keeps_milestones)

    def logs(self, step: int) -> bool:
        """Whether step number `step` (1 for the first) is logged."""
        return self._is_due(self.log_interval, step)

    def verifies(self, step: int) -> bool:
        """Whether step number `step` is computed twice."""
        return self.verify_interval is not None and step % self.verify_interval == 0

    def after(self, step: int) -> tuple[str, ...]:
        """The names of the work that is due after a step, in this order."""
        before, now = self.pace.place(step - 1), self.pace.place(step)
        is_milestone = any(before < place <= now for place in self._kept_places)
        names = {
            VALIDATE: self._is_due(self.eval_interval, step, "eval_interval"),
            EVALUATE: self._is_due(self.evaluation_interval, step, "evaluation_interval"),
            SAMPLE: self._is_due(self.sample_interval, step, "sample_interval"),
            SAVE: self._is_due(self.checkpoint_interval, step, "checkpoint_interval") or is_milestone,
        }
        return tuple(name for name, due in names.items() if due)

    def after_validation(self, state: TrainingState, loss: float) -> TrainingState:
        """The state after a validation; a checkpoint is due if the loss is the best or early stopping ends the run."""
        best = state.best_loss
        is_best = loss < (math.inf if best is None else best)  # NaN is never the best
        if is_best:
            state = state.after(best_loss=loss, best_step=state.step)
        state = self.early_stopping.after(state, loss)
        if (is_best or self.early_stopping.is_over(state)) and SAVE not in state.due:
            state = state.after(due=(*state.due, SAVE))
        return state

    def is_over(self, state: TrainingState) -> bool:
        """Whether the last step is taken, or early stopping ends the run."""
        return state.step >= self.total_steps or self.early_stopping.is_over(state)

    def _is_due(self, interval: int | None, step: int, name: str = "") -> bool:
        if interval is None or step == self.total_steps:
            return interval is not None
        if name not in self.paced:
            return step % interval == 0
        return self.pace.place(step) // interval > self.pace.place(step - 1) // interval
