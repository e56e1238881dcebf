"""KTO: the divergence from the reference is one number for a step, and mismatched answers are of other prompts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.posttrain.example_batches import GroupedExamples
from sheepop.posttrain.example_store import ExampleSplit
from sheepop.posttrain.preference import JudgedAnswers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.validation import mean_losses

# Prompt, answer, and whether the answer is desirable; the answers to a prompt stand together.
ROWS = [
    ([1, 2], [3, 4, 5], 1.0), ([1, 2], [6], -1.0), ([1, 2], [7, 8], 1.0),
    ([9], [10, 11], -1.0), ([12, 13, 14], [15], 1.0), ([12, 13, 14], [16, 17], -1.0),
]  # fmt: skip
# For each row, the next one with another prompt.
OTHERS = [3, 3, 3, 4, 0, 0]
BETA, WEIGHTS = 0.5, (1.0, 1.5)


def split_of(rows: list[tuple[list[int], list[int], float]]) -> ExampleSplit:
    return ExampleSplit(
        np.concatenate([[*prompt, *answer] for prompt, answer, _ in rows]).astype(np.int32),
        np.concatenate([[0] * len(prompt) + [1] * len(answer) for prompt, answer, _ in rows]).astype(np.uint8),
        np.cumsum([len(prompt) + len(answer) for prompt, answer, _ in rows]),
        np.array([value for *_, value in rows], np.float32),
    )


@pytest.fixture(scope="module")
def models() -> tuple[Transformer, Transformer]:
    """A policy and its reference."""
    sizes: dict[str, Any] = {"vocab_size": 30, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}
    policy, reference = (build_model(ModelConfig(**sizes, dropout=0.0), seed=seed).eval() for seed in (4, 3))
    return policy, reference


def log_probability(model: Transformer, prompt: list[int], answer: list[int]) -> Tensor:
    """``log p(answer | prompt)``, token by token."""
    log_p = model(torch.tensor([prompt + answer]))[0].log_softmax(-1)
    return sum((log_p[len(prompt) - 1 + place, token] for place, token in enumerate(answer)), torch.zeros(()))


def expected_loss(policy: Transformer, reference: Transformer) -> tuple[Tensor, float]:
    """The mean loss of the rows, and the divergence that it contains (Ethayarajh et al. 2024, eq. 8)."""

    def ratio(prompt: list[int], answer: list[int]) -> Tensor:
        return log_probability(policy, prompt, answer) - log_probability(reference, prompt, answer).detach()

    mismatched = [ratio(prompt, ROWS[other][1]).item() for (prompt, *_), other in zip(ROWS, OTHERS, strict=True)]
    z, total = max(0.0, sum(mismatched) / len(ROWS)), torch.zeros((), dtype=torch.float64)
    for prompt, answer, value in ROWS:
        away = ratio(prompt, answer) - z
        weight, signed = (WEIGHTS[0], away) if value > 0 else (WEIGHTS[1], -away)
        total += weight * (1 - 1 / (1 + torch.exp(-BETA * signed)))
    return total / len(ROWS), z


def grouped(models: tuple[Transformer, Transformer]) -> GroupedExamples:
    _, reference = models
    found = [
        [log_probability(reference, prompt, some).item() for some in (answer, ROWS[other][1])]
        for (prompt, answer, _), other in zip(ROWS, OTHERS, strict=True)
    ]
    groups = GroupedExamples(split_of(ROWS), max_length=16, pad_id=0, mismatched=True)
    return groups.with_reference(np.array(found, np.float32))


def test_a_mismatched_answer_is_of_another_prompt(models: tuple[Transformer, Transformer]) -> None:
    groups = grouped(models)
    for number, ((prompt, answer, _), other) in enumerate(zip(ROWS, OTHERS, strict=True)):
        own, mismatched = groups.group(number)
        assert own.ids.tolist() == prompt + answer
        assert mismatched.ids.tolist() == prompt + ROWS[other][1]
        assert mismatched.supervised.tolist() == [0] * len(prompt) + [1] * len(ROWS[other][1])
    of_one_prompt = GroupedExamples(split_of(ROWS[:3]), max_length=16, pad_id=0, mismatched=True)
    assert [of_one_prompt.group(number)[1].ids.tolist() for number in range(3)] == [
        [1, 2, 6], [1, 2, 7, 8], [1, 2, 3, 4, 5],
    ]  # fmt: skip


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 6])
def test_the_loss_of_a_step_does_not_depend_on_its_micro_batches(
    models: tuple[Transformer, Transformer], micro_batch_size: int
) -> None:
    exact = copy.deepcopy(models[0]).double()
    expected, z = expected_loss(exact, copy.deepcopy(models[1]).double())
    expected.backward()
    assert z > 0.01, "a divergence that is clamped to 0 would hide the difference"
    placement, objective = OneDevice(models[0], precision="fp32", device="cpu"), JudgedAnswers(BETA, WEIGHTS)
    prepared = PreparedStep.of(grouped(models).batch(np.arange(len(ROWS))), micro_batch_size, objective, device="cpu")
    found = StepRunner(placement, objective, [], TrainedWeights(), None).gradients(prepared)
    assert found.losses.means()[1] == pytest.approx(expected.item(), rel=1e-5)
    for (name, parameter), other in zip(models[0].named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        torch.testing.assert_close(parameter.grad.to_dense().double(), other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_score_of_a_split_does_not_depend_on_batches(
    models: tuple[Transformer, Transformer], batch_size: int
) -> None:
    found = mean_losses(
        models[0], JudgedAnswers(BETA, WEIGHTS), grouped(models), batch_size=batch_size, precision="fp32", device="cpu"
    )
    assert found.loss == pytest.approx(expected_loss(*models)[0].item(), rel=1e-5)
