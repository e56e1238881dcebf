"""The counters of a run and the checkpoints they are part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from sheepop.checkpoint import RunDirectory, read_training_state, write_model, write_training_state
from sheepop.checkpoint.model_directory import WEIGHTS, load_weights, read_weights
from sheepop.core.errors import CheckpointError
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer

# What states written before these were counted do not hold; they begin at their defaults.
_ADDED_LATER = {"reference_loss", "stale_validations"}


@dataclass(frozen=True)
class TrainingState:
    """Everything a run must remember beside weights and optimizer; random streams are computed, not remembered."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    metrics_bytes: int = 0
    samples_bytes: int = 0
    reference_loss: float | None = None  # the validation loss that later ones are to improve on
    stale_validations: int = 0  # validations in a row that did not

    def after(self, **changes: Any) -> TrainingState:
        """A copy in which the given counters differ."""
        return replace(self, **changes)


class Checkpointer:
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self,
        run: RunDirectory,
        model: Transformer,
        tokenizer: Tokenizer,
        optimizers: Sequence[torch.optim.Optimizer],
        provenance: Mapping[str, Any],
    ) -> None:
        self.run = run
        self._model = model
        self._tokenizer = tokenizer
        self._optimizers = optimizers
        self._provenance = provenance
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def save(self, state: TrainingState) -> None:
        """Writes the checkpoint of `state.step`: a model directory plus ``state/``."""
        with self.run.write_checkpoint(state.step) as directory:
            provenance = {**self._provenance, "step": state.step, "tokens": state.tokens}
            write_model(directory, self._model, self._tokenizer, provenance)
            write_training_state(directory, self._optimizers, self._names, asdict(state))

    def load(self, step: int) -> TrainingState:
        """Restores weights and optimizer from the checkpoint of `step` and returns its counters."""
        directory = self.run.checkpoint(step)
        load_weights(self._model, read_weights(directory / WEIGHTS), directory / WEIGHTS)
        counters = read_training_state(directory, self._optimizers, self._names)
        known = {field.name for field in fields(TrainingState)}
        odd = ", ".join(sorted((counters.keys() ^ known) - (_ADDED_LATER - counters.keys())))
        if odd:
            raise CheckpointError(f"{directory / 'state'} does not hold the counters of a run: {odd}.")
        return TrainingState(**counters)
