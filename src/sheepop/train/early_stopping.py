"""Early stopping: a run whose held-out loss no longer falls has learnt what it will (Prechelt 1998).

What is counted is part of the training state, so that a resumed run stops where the unbroken one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sheepop.train.state import TrainingState


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after `patience` validations in a row without improvement; None never does.

    An improvement is a loss more than `delta` nats per token below the last loss that was one.
    """

    patience: int | None
    delta: float = 0.0

    def after(self, state: TrainingState, loss: float) -> TrainingState:
        """The state with one more validation counted."""
        reference = math.inf if state.reference_loss is None else state.reference_loss
        if loss < reference - self.delta:
            return state.after(reference_loss=loss, stale_validations=0)
        return state.after(stale_validations=state.stale_validations + 1)

    def is_over(self, state: TrainingState) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and state.stale_validations >= self.patience
