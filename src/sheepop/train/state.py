"""The counters of a run and the checkpoints they are part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint import RunDirectory, optimizer_state, read_training_state, write_model, write_training_state
from sheepop.checkpoint.background import BackgroundWriter
from sheepop.checkpoint.model_directory import load_weights, unique_weights
from sheepop.checkpoint.training_state import TRAINED, read_trained_weights
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.errors import CheckpointError
from sheepop.core.files import damaged_files
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer
from sheepop.train.evaluation_weights import EvaluationWeights
from sheepop.train.loss_scale import LossScale
from sheepop.train.optimizers import optimizer_slots
from sheepop.train.trouble import Window

# What states written before these were counted do not hold; they begin at their defaults.
_ADDED_LATER = {"reference_loss", "stale_validations"}


@dataclass(frozen=True)
class TrainingState:
    """Everything a run must remember beside weights and optimizer; random streams are computed, not remembered.

    `due` names what was still to be done at this step when the state was saved. `left_out` are the batches that
    training passes over, by their number in the order of batches; `rewound_to` is the step to which the run went back
    last.
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
    loss_scale: LossScale | None = None  # of float16 only
    reference_loss: float | None = None  # the validation loss that later ones are to improve on
    stale_validations: int = 0  # validations in a row that did not

    def after(self, **changes: Any) -> TrainingState:
        """A copy in which the given counters differ."""
        return replace(self, **changes)

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest held-out loss so far and its step."""
        return None if self.best_loss is None or self.best_step is None else (self.best_loss, self.best_step)

    @property
    def batch_number(self) -> int:
        """The number, in the order of batches, of the one that the next step takes: those left out are passed over."""
        number = self.step
        for left_out in sorted(self.left_out):
            number += left_out <= number
        return number

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainingState:
        """Reads what `asdict` gave; counters of later versions are missing in older records. Raises `ValueError`."""
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


class Checkpointer:
    """Writes and reads the checkpoints of one run. Writing goes on beside the loop; `check` raises what went wrong.

    Close it at the end.
    """

    def __init__(
        self,
        run: RunDirectory,
        model: Transformer,
        tokenizer: Tokenizer,
        optimizers: Sequence[torch.optim.Optimizer],
        evaluation: EvaluationWeights,
        provenance: Mapping[str, Any],
    ) -> None:
        self.run = run
        self._model = model
        self._tokenizer = tokenizer
        self._optimizers = optimizers
        self._evaluation = evaluation
        self._provenance = provenance
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._writer = BackgroundWriter()

    def save(
        self,
        state: TrainingState,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies the state as it is now and starts writing it as the checkpoint of `state.step`.

        The model is the one to be used, with the evaluation weights; ``state/`` has the trained ones when they differ.
        Waits for the checkpoint before. `before` runs ahead of the writing and must make durable what the state speaks
        of; `after` runs when the checkpoint is the latest.
        """
        self._writer.wait()
        with self._evaluation.applied():
            weights = _copies(unique_weights(self._model))
        trained = _copies(unique_weights(self._model)) if self._evaluation.differ else None
        optimizer = optimizer_state(self._optimizers, self._names)
        optimizer = replace(optimizer, tensors=_copies(optimizer.tensors))
        provenance = {**self._provenance, "step": state.step, "tokens": state.tokens}

        def write() -> None:
            before()
            with self.run.write_checkpoint(state.step) as directory:
                write_model(directory, self._model.config, weights, self._tokenizer, provenance)
                write_training_state(directory, optimizer, asdict(state), trained)
            after()

        self._writer.submit(write)

    def check(self) -> None:
        """Raises what went wrong in writing, if anything did by now."""
        self._writer.check()

    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises what went wrong."""
        self._writer.wait()

    def close(self) -> None:
        """Waits for what is being written, and ends."""
        self._writer.close()

    def with_best(self, state: TrainingState, warn: Callable[[str], None]) -> TrainingState:
        """Points ``best`` at the best checkpoint that `state`, just loaded, knows of; without it where that is lost."""
        best = state.best_step
        if best is None:
            return state
        problems = [] if best == state.step else damaged_files(self.run.checkpoint(best))
        if not problems:
            if self.run.pointer("best") != best:
                self.run.mark_best(best)
            return state
        what = f"damaged ({'; '.join(problems)})" if best in self.run.steps() else "gone"
        warn(f"The best checkpoint, step {best}, is {what}; the next validation names a new one.")
        self.run.forget_best()
        return state.after(best_loss=None, best_step=None)

    def load(self, step: int) -> TrainingState:
        """Restores weights and optimizer from the checkpoint of `step` and returns its counters."""
        directory = self.run.checkpoint(step)
        trained = read_trained_weights(directory, expected=self._evaluation.differ)
        load_weights(self._model, read_all_weights(directory), directory)
        if trained is not None:
            self._evaluation.adopt()
            load_weights(self._model, trained, directory / "state" / TRAINED)
        counters = read_training_state(directory, self._optimizers, self._names, optimizer_slots)
        try:
            return TrainingState.from_record(counters)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{directory / 'state'} does not hold the counters of a run: {error}.") from None


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, which the loop may not touch any more; from a GPU through pinned memory."""
    copies = {}
    for name, tensor in tensors.items():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies
