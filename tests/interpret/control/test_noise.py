"""The noise of the gradient against a mixture whose noise is planted."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.interpret.control.noise import NoiseSample, NoiseScale
from sheepop.interpret.control.watching import noise_row
from sheepop.model import ModelConfig, build_model
from sheepop.train.tensor_batch import TensorBatch

from .conftest import SMALL

DEVIATION, WIDTH = 3.0, 50


def samples(count: int, rows: int, pieces: int = 8) -> list[NoiseSample]:
    """Batches whose rows have the gradient 1 in one direction, plus normal noise in all: the scale is 9 * 50."""
    generator = torch.Generator().manual_seed(0)
    true = torch.eye(WIDTH)[0]
    found = []
    for _ in range(count):
        noise = torch.randn(pieces, rows, WIDTH, generator=generator) * DEVIATION
        found.append(NoiseSample.of(([piece] for piece in true + noise.mean(1)), rows))
    return found


def test_a_planted_noise_scale_is_found_within_its_interval() -> None:
    planted = DEVIATION**2 * WIDTH
    found = NoiseScale.of(samples(60, rows=64))
    assert found.low < planted < found.high
    assert found.high / found.low < 1.6
    many = samples(400, rows=64)
    assert sum(sample.noise for sample in many) / 400 == pytest.approx(planted, rel=0.02)
    assert sum(sample.signal for sample in many) / 400 == pytest.approx(1, rel=0.1)


def test_the_estimates_of_two_pieces_by_hand() -> None:
    """Gradients 3 and 1 of 4 rows each: their squares have mean 5, that of their mean is 4."""
    found = NoiseSample.of([[torch.tensor([3.0])], [torch.tensor([1.0])]], rows=4)
    assert (found.noise, found.signal) == (pytest.approx(4 * (5 - 4) * 2), pytest.approx(2 * 4 - 5))


def test_the_interval_is_right_as_often_as_it_says() -> None:
    planted = DEVIATION**2 * WIDTH
    many = samples(600, rows=64)
    scales = [NoiseScale.of(many[start : start + 10]) for start in range(0, 600, 10)]
    hits = sum(scale.low < planted < scale.high for scale in scales)
    assert hits >= 0.85 * len(scales)


def test_noise_without_signal_has_no_upper_bound() -> None:
    found = NoiseScale.of([NoiseSample(10.0, signal) for signal in (-0.2, 0.1, 0.05, -0.1)])
    assert found.rows == math.inf and found.high == math.inf and 0 < found.low < math.inf
    assert NoiseScale.of([NoiseSample(10.0, 1.0)]) == NoiseScale(10.0, 0.0, math.inf)
    with pytest.raises(ValueError, match="at least 2 pieces"):
        NoiseSample.of([[torch.ones(1)]], rows=1)


@pytest.mark.parametrize(
    ("micro_batches", "passes"),
    [([16], [2] * 8 + [2, 8]), ([2], [1, 1, 1, 4]), ([8, 8], [2] * 8), ([1], [])],
)
def test_a_few_rows_of_a_step_are_timed_beside_four_times_as_many(micro_batches: list[int], passes: list[int]) -> None:
    """After the passes for the noise. A step of several micro-batches is not timed."""
    model, sizes = build_model(ModelConfig(**SMALL), seed=0).eval(), list[int]()
    ids = [torch.randint(0, 128, (rows, 5)) for rows in micro_batches]
    batches = [TensorBatch({"input_ids": each}, each, slice(None)) for each in ids]
    model.layers[0].register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    row = noise_row(model, batches, "cpu")
    assert sizes == passes
    assert ("timed_rows" in row) == (len(micro_batches) == 1 and micro_batches != [1])
