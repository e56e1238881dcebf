"""Scores of a model on the held-out split: the mean of an objective; for text loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sheepop.core.facts import counted
from sheepop.data import Batch, Batches
from sheepop.model import IGNORE_INDEX, Outputs, Transformer
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.model.head import OutputHead
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.train.objective import Objective
from sheepop.train.placement import Network
from sheepop.train.precision import autocast
from sheepop.train.tensor_batch import TensorBatch


class Scores(Protocol):
    """The scores of a model on the held-out split. A lower `loss` is better; `str` gives all scores in words."""

    loss: float

    @property
    def extent(self) -> str:
        """The amount of scored text or other data, in words."""

    def metrics(self) -> dict[str, float]:
        """The scores by name, including the loss."""

    def counts(self) -> dict[str, float]:
        """The numbers of scored units, such as tokens and bytes."""

    def to_dict(self) -> dict[str, float]:
        """The scores and counts as plain data."""
        return {**self.metrics(), **self.counts()}


@dataclass(frozen=True)
class TokenScores(Scores):
    """Means over the predicted tokens of a held-out split."""

    loss: float  # nats per token
    perplexity: float  # exp(loss)
    accuracy: float  # share of tokens whose most likely prediction is right
    bits_per_byte: float  # total loss in bits over the UTF-8 bytes of the predicted tokens
    tokens: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, perplexity {self.perplexity:,.2f}, accuracy {self.accuracy:.1%}, "
            f"{self.bits_per_byte:.4f} bits per byte"
        )

    @property
    def extent(self) -> str:
        """The tokens."""
        return counted(self.tokens, "token")

    def metrics(self) -> dict[str, float]:
        """The four means."""
        return {name: value for name, value in asdict(self).items() if name not in self.counts()}

    def counts(self) -> dict[str, float]:
        """The numbers of tokens and bytes."""
        return {"tokens": self.tokens, "bytes": self.bytes}


def scored_samples(batches: Batches, max_tokens: int | None) -> NDArray[np.int64]:
    """The indices of the samples to score: all, or samples at even distances with about `max_tokens` tokens."""
    count = batches.num_samples
    if max_tokens is not None:
        count = min(count, max(1, int(max_tokens / batches.tokens_per_sample)))
    return np.linspace(0, batches.num_samples - 1, count).round().astype(np.int64)


def validate(
    model: Transformer,
    batches: Batches,
    byte_lengths: NDArray[np.int64],
    *,
    batch_size: int,
    precision: str,
    device: str,
    max_tokens: int | None = None,
    on_batch: Callable[[int], None] | None = None,
    ranks: Ranks = ALONE,
    memory: CorpusMemory | None = None,
) -> TokenScores:
    """Scores `model`, which is in evaluation mode, on the samples of `batches` in order, with its `memory` or without.

    `byte_lengths` (V,) gives the bytes of each token. With `max_tokens` it scores samples at even distances over the
    whole split, with about that many positions. `on_batch` is called with the number of samples of each batch. Each of
    several `ranks` reads its share of the samples. Raises `ValueError` for a model in training mode, because dropout
    would change the scores.
    """
    if model.training:
        raise ValueError("a model is scored in evaluation mode; call eval() on it first")
    chosen = scored_samples(batches, max_tokens)[ranks.rank :: ranks.size]
    loss_sum, correct, num_tokens, num_bytes = 0.0, 0, 0, 0
    # Not inference_mode, which the weights of float8 layers do not support.
    with torch.no_grad():
        for start in range(0, len(chosen), batch_size):
            samples = batches.batch(chosen[start : start + batch_size])
            batch = TensorBatch.from_numpy(samples, device)
            with autocast(device, precision):
                inputs: dict[str, Any] = dict(batch.inputs)
                hidden_BTD = model.hidden_states(**inputs)
                batch_loss, right = (
                    model.lm_head.score(hidden_BTD, batch.labels)
                    if memory is None
                    else _score_with(memory, model, hidden_BTD, samples)
                )
            loss_sum += batch_loss.item()
            correct += int(right)
            labels = samples.labels[samples.labels != IGNORE_INDEX]
            num_tokens += labels.size
            num_bytes += int(byte_lengths[labels].sum())
            if on_batch is not None:
                on_batch(len(samples.labels))
    if ranks.are_several:
        found = ranks.total(torch.tensor([loss_sum, correct, num_tokens, num_bytes], dtype=torch.float64))
        loss_sum, (correct, num_tokens, num_bytes) = float(found[0]), map(int, found[1:])
    loss = loss_sum / max(1, num_tokens)
    return TokenScores(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        accuracy=correct / max(1, num_tokens),
        bits_per_byte=loss_sum / math.log(2) / max(1, num_bytes),
        tokens=num_tokens,
        bytes=num_bytes,
    )


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


def _score_with(memory: CorpusMemory, model: Transformer, hidden_BTD: Tensor, samples: Batch) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy and the number of right predictions, with the memory of the model."""
    device = hidden_BTD.device
    input_ids, positions, labels = (
        torch.from_numpy(array).to(device) for array in (samples.input_ids, samples.positions, samples.labels)
    )
    recalled, labels_N = memory.recall(input_ids, positions + 1), labels.flatten()
    loss, right = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for places, logits_RV in model.lm_head.blocks_of_logits(hidden_BTD.flatten(0, 1)):
        corrected, own = memory(logits_RV, recalled.rows(places)), labels_N[places]
        loss += functional.cross_entropy(corrected, own, ignore_index=IGNORE_INDEX, reduction="sum").double().cpu()
        right += (corrected.argmax(-1) == own).sum().cpu()
    return loss, right
