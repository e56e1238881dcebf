"""Log-probabilities of whole answers, hidden states of their last tokens, and mean losses over a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sheepop.data import Batches
from sheepop.model import IGNORE_INDEX, Outputs, Transformer
from sheepop.model.head import OutputHead
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.train.objective import Objective
from sheepop.train.placement import Network
from sheepop.train.precision import autocast
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import scored_samples


@dataclass(frozen=True, eq=False)
class FinishedNetwork(Network):
    """A model that is not trained, as a `Network` for objectives."""

    model: Transformer

    @property
    def head(self) -> OutputHead:
        """The output head of the model."""
        return self.model.lm_head

    @property
    def modules(self) -> Transformer:
        """The model."""
        return self.model

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """The outputs of a forward pass."""
        return self.model.run(**inputs)

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states of a forward pass."""
        return self.run(inputs).hidden_states


def answer_log_probabilities(network: Network, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """``log pi(y | x)`` of answers y, summed in float32, and their lengths in tokens.

    Both are (P, G) for P groups of G answers, (P,) for P rows.
    """
    labels = batch.labels.flatten(0, -2)
    log_p = network.head.log_probabilities(network.hidden_states(batch.rows), labels, batch.supervised)
    shape = batch.labels.shape[:-1]
    return log_p.sum(-1).view(shape), (labels != IGNORE_INDEX).sum(-1).view(shape)


def last_states(network: Network, batch: TensorBatch) -> Tensor:
    """The hidden states (P, G, D) of the last tokens of answers, by the lengths in `batch.given`."""
    hidden = network.hidden_states(batch.rows)  # (P G, T, D)
    last = (batch.given["lengths"].flatten() - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, last).view(*batch.labels.shape[:2], -1)


@dataclass(frozen=True, eq=False)
class MeanLosses:
    """The mean loss of an objective over a split, the `count` it is a mean over, and the sums of its other measures."""

    loss: float
    count: int
    measured: Mapping[str, Tensor]


@torch.no_grad()
def mean_losses(
    model: Transformer,
    objective: Objective,
    batches: Batches,
    *,
    batch_size: int,
    precision: str,
    device: str,
    max_tokens: int | None = None,
    on_batch: Callable[[int], None] | None = None,
    ranks: Ranks = ALONE,
) -> MeanLosses:
    """Computes `objective` for a finished model on the samples of a split, or on about `max_tokens` spread evenly.

    Calls `on_batch` with the number of samples in each batch. Several `ranks` share the samples.
    """
    chosen = scored_samples(batches, max_tokens)[ranks.rank :: ranks.size]
    network, total, supervised = FinishedNetwork(model), 0.0, 0
    measured: dict[str, Tensor] = {}
    cuts = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    with autocast(device, precision):
        read = (TensorBatch.from_numpy(batches.batch(cut), device) for cut in cuts)
        objective = objective.of_step(network, read, ranks.total)
    for cut in cuts:
        samples = batches.batch(cut)
        with autocast(device, precision):
            sums = objective.loss_sums(network, TensorBatch.from_numpy(samples, device))
        total += sums.cross_entropy.item()
        supervised += objective.supervised(samples)
        for name, value in sums.measured.items():
            measured[name] = value.double() + measured.get(name, 0.0)
        if on_batch is not None:
            on_batch(len(samples.labels))
    if ranks.are_several:
        total, supervised = ranks.total(torch.tensor([total, supervised], dtype=torch.float64)).tolist()
        # If any rank has samples, the first one has.
        shapes = ranks.told({name: list(value.shape) for name, value in measured.items()})
        nothing = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        measured = {name: ranks.total(measured.get(name, value)) for name, value in nothing.items()}
    return MeanLosses(total / max(1, supervised), int(supervised), measured)


@torch.no_grad()
def log_probabilities_of(
    model: Transformer,
    batches: Batches,
    *,
    batch_size: int,
    precision: str,
    device: str,
    on_batch: Callable[[int], None] = lambda done: None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The log-probabilities (groups, G) of all answers of a split under a finished model, without gradients."""
    found, network = [], FinishedNetwork(model)
    for start in range(0, batches.num_samples, batch_size):
        indices = np.arange(start, min(batches.num_samples, start + batch_size))
        batch = TensorBatch.from_numpy(batches.batch(indices), device)
        with autocast(device, precision):
            found.append(answer_log_probabilities(network, batch)[0].float().cpu())
        on_batch(len(indices))
    return torch.cat(found).numpy() if found else np.zeros((0, 2), np.float32)
