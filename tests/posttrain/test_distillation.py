"""The loss of distillation against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, ModelConfig, build_model
from sheepop.posttrain import supervised
from sheepop.posttrain.supervised import Distillation
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork


def batch_of_rows(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> Batch:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return Batch(ids, labels, positions, np.zeros_like(ids), False)


def network(seed: int, width: int, vocabulary: int = 23) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": width,
        "num_layers": 1,
        "num_heads": 2,
        "max_seq_len": 16,
    }
    return build_model(ModelConfig(**sizes, dropout=0.0), seed=seed, device="cpu").eval()


def divergence(p: list[float], q: list[float], beta: float) -> float:
    """The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, section 2) in a loop."""

    def kl(one: list[float], other: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 0.0 else kl(q, p)
    mixed = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


@pytest.mark.parametrize(
    ("weight", "temperature", "beta", "vocabulary"),
    [(0.3, 1.0, 0.0, 23), (1.0, 2.5, 0.0, 23), (1.0, 1.0, 1.0, 23), (1.0, 0.7, 0.5, 24), (0.6, 1.0, 0.1, 32)],
)
def test_the_loss_is_that_of_a_loop(
    monkeypatch: pytest.MonkeyPatch, weight: float, temperature: float, beta: float, vocabulary: int
) -> None:
    monkeypatch.setattr(supervised, "chunk_rows", lambda *_: 4)  # tokens at a time
    student, teacher = network(1, 16), network(2, 24, vocabulary).requires_grad_(False)
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, 23, (3, 9)), draw.integers(0, 23, (3, 9))
    labels[draw.random((3, 9)) < 0.4] = IGNORE_INDEX
    expected = cross_entropy = 0.0
    with torch.no_grad():
        ours, theirs = (model(torch.from_numpy(ids)).double() for model in (student, teacher))
    for b, t in zip(*np.nonzero(labels != IGNORE_INDEX), strict=True):
        p, q = ((logits[b, t, :23] / temperature).softmax(-1).tolist() for logits in (theirs, ours))
        ce = -float(ours[b, t].log_softmax(-1)[labels[b, t]])
        cross_entropy += ce
        expected += (1 - weight) * ce + weight * temperature**2 * divergence(p, q, beta)
    batch = TensorBatch.from_numpy(batch_of_rows(ids, labels), "cpu")
    sums = Distillation(teacher, weight, temperature, beta).loss_sums(FinishedNetwork(student), batch)
    assert sums.objective.item() == pytest.approx(expected, rel=1e-4)
    assert sums.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-5)
    sums.objective.backward()
    assert student.embedding.weight.grad is not None
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_that_is_the_model_itself_teaches_nothing(beta: float) -> None:
    model = network(1, 16)
    ids = np.random.default_rng(0).integers(0, 23, (2, 9))
    batch = TensorBatch.from_numpy(batch_of_rows(ids, ids), "cpu")
    teacher = network(1, 16).requires_grad_(False)
    sums = Distillation(teacher, 1.0, 1.0, beta).loss_sums(FinishedNetwork(model), batch)
    assert sums.objective.item() == pytest.approx(0.0, abs=1e-4)
