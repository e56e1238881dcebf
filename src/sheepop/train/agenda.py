"""What is due when: logging, validations, evaluations, samples, checkpoints, and the end of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sheepop.train.config import ResolvedTraining, TrainingConfig
from sheepop.train.counters import TrainingState
from sheepop.train.pace import Pace

VALIDATE, EVALUATE, SAMPLE, SAVE = "validate", "evaluate", "sample", "save"
MILESTONES = (0.10, 0.25, 0.50)  # shares of the steps whose checkpoints are kept


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose held-out loss no longer falls: it has learnt what it will (Prechelt 1998).

    That is after `patience` validations in a row without improvement; None never does. An improvement is a loss more
    than `delta` nats per token below the last loss that was one. What is counted is part of the training state, so that
    a resumed run stops where the unbroken one does.
    """

    patience: int | None = None
    delta: float = 0.0

    def after(self, state: TrainingState, loss: float) -> TrainingState:
        """The state with one more validation counted; a loss that is no number is no improvement."""
        reference = state.reference_loss
        if loss < (math.inf if reference is None else reference - self.delta):
            return state.after(reference_loss=loss, stale_validations=0)
        return state.after(stale_validations=state.stale_validations + 1)

    def is_over(self, state: TrainingState) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and state.stale_validations >= self.patience


@dataclass(frozen=True)
class Agenda:
    """The intervals of a run, in steps; the last step is due for everything. None is never due."""

    pace: Pace
    log_interval: int
    eval_interval: int | None
    sample_interval: int
    checkpoint_interval: int
    verify_interval: int | None = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    evaluation_interval: int | None = None

    @classmethod
    def of(
        cls,
        config: TrainingConfig,
        resolved: ResolvedTraining,
        *,
        validates: bool,
        evaluation_interval: int | None = None,
    ) -> Agenda:
        """What a configuration says; without held-out text nothing is validated."""
        return cls(
            resolved.pace,
            config.log_interval,
            resolved.eval_interval if validates else None,
            resolved.sample_interval,
            resolved.checkpoint_interval,
            config.verify_interval,
            EarlyStopping(config.early_stopping, config.early_stopping_delta),
            evaluation_interval,
        )

    @property
    def total_steps(self) -> int:
        """The steps of the run as things stand."""
        return self.pace.total_steps

    @property
    def milestones(self) -> set[int]:
        """The steps whose checkpoints are kept for good."""
        return {math.ceil(self.pace.planned * share) for share in MILESTONES}

    def logs(self, step: int) -> bool:
        """Whether step number `step` (1 for the first) is written down."""
        return self._is_due(self.log_interval, step)

    def verifies(self, step: int) -> bool:
        """Whether a micro-batch of step number `step` is computed twice."""
        return self.verify_interval is not None and step % self.verify_interval == 0

    def after(self, step: int) -> tuple[str, ...]:
        """What is to be done after a step, in this order."""
        names = {
            VALIDATE: self._is_due(self.eval_interval, step),
            EVALUATE: self._is_due(self.evaluation_interval, step),
            SAMPLE: self._is_due(self.sample_interval, step),
            SAVE: self._is_due(self.checkpoint_interval, step) or step in self.milestones,
        }
        return tuple(name for name, due in names.items() if due)

    def after_validation(self, state: TrainingState, loss: float) -> TrainingState:
        """`state` with a held-out loss counted: the best of all, and the last of a run that ends here, are saved."""
        best = state.best_loss
        is_best = loss < (math.inf if best is None else best)  # a loss that is no number is never the best
        if is_best:
            state = state.after(best_loss=loss, best_step=state.step)
        state = self.early_stopping.after(state, loss)
        if (is_best or self.early_stopping.is_over(state)) and SAVE not in state.due:
            state = state.after(due=(*state.due, SAVE))
        return state

    def is_over(self, state: TrainingState) -> bool:
        """Whether the last step is taken, or patience is at its end."""
        return state.step >= self.total_steps or self.early_stopping.is_over(state)

    def _is_due(self, interval: int | None, step: int) -> bool:
        return interval is not None and (step % interval == 0 or step == self.total_steps)
