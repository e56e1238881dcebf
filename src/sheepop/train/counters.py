"""The counters of a run: its state without weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sheepop.core.files import finite
from sheepop.train.precision import LossScale
from sheepop.train.trouble import Window


@dataclass(frozen=True)
class TrainingState:
    """The state of a run without weights and optimizer; random streams follow from the seed and the step.

    `due` names the work that was still due after this step when the state was saved. `left_out` are the numbers of the
    batches that training skips; `rewound_to` is the step of the last rewind. `scores` are the newest scores of each
    kind, as the model's provenance lists them.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    metrics_bytes: int = 0
    samples_bytes: int = 0
    due: tuple[str, ...] = ()
    window: Window = field(default_factory=Window)
    skips_in_a_row: int = 0
    rewinds: int = 0
    rewound_to: int | None = None
    left_out: tuple[int, ...] = ()
    loss_scale: LossScale | None = None  # only for float16
    reference_loss: float | None = None  # the validation loss of the last improvement
    stale_validations: int = 0  # validations in a row without improvement
    scores: tuple[Mapping[str, Any], ...] = ()

    def after(self, **changes: Any) -> TrainingState:
        """A copy with the given changes."""
        return replace(self, **changes)

    def scored(self, scores: Sequence[Mapping[str, Any]]) -> TrainingState:
        """A copy in which these scores of this step replace those of the same kinds."""
        kinds = {score["kind"] for score in scores}
        kept = [score for score in self.scores if score["kind"] not in kinds]
        return self.after(scores=(*kept, *(finite({**score, "step": self.step}) for score in scores)))

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest held-out loss so far and its step."""
        return None if self.best_loss is None or self.best_step is None else (self.best_loss, self.best_step)

    @property
    def batch_number(self) -> int:
        """The number of the batch that the next step takes, with those in `left_out` skipped."""
        number = self.step
        for left_out in sorted(self.left_out):
            number += left_out <= number
        return number

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainingState:
        """Reads what `asdict` returned, also of an earlier version, which has fewer counters.

        Raises `ValueError` for a record without step and metrics_bytes, or with unknown counters.
        """
        if unknown := record.keys() - {entry.name for entry in fields(cls)}:
            raise ValueError(f"unknown counters: {', '.join(sorted(unknown))}")
        if "step" not in record or "metrics_bytes" not in record:
            raise ValueError("step and metrics_bytes are missing")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        if "window" in record:
            given["window"] = Window(**{name: tuple(values) for name, values in record["window"].items()})
        if record.get("loss_scale") is not None:
            given["loss_scale"] = LossScale(**record["loss_scale"])
        return cls(**given)
