"""Drift that was planted is found, none is found where there is none, and the farthest prompts are the planted ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from sheepop.core.errors import DataError
from sheepop.evaluate.statistics import probability_above
from sheepop.monitor.drift import _dual_weights, drift, samples
from sheepop.monitor.words import telling_words, word_vectors

KNOWN = [f"{one}{other}" for one in ("ba", "ke", "lo", "mi", "nu") for other in ("ra", "so", "ti", "vu", "ze", "po")]
STRANGE = [f"{word[:3]}q" for word in KNOWN]  # as long


def text(draw: random.Random, words: list[str], count: int) -> str:
    """Words of which the first are the most common."""
    return " ".join(draw.choices(words, [1 / rank for rank in range(1, len(words) + 1)], k=count))


def documents(draw: random.Random) -> Iterator[str]:
    return (text(draw, KNOWN, 300) for _ in range(60))


def test_prompts_from_the_data_are_within_the_interval_19_times_of_20() -> None:
    inside = 0
    for seed in range(40):
        draw = random.Random(f"drift {seed}")
        found = drift(samples([text(draw, KNOWN, 8) for _ in range(60)], documents(draw), seed), word_vectors)
        inside += found.told.low <= 0.5 <= found.told.high
    assert inside >= 36


def test_one_prompt_in_five_from_elsewhere_is_found() -> None:
    for seed in range(5):
        draw = random.Random(f"drift {seed}")
        prompts = [text(draw, STRANGE if number % 5 == 0 else KNOWN, 8) for number in range(300)]
        drawn = samples(prompts, documents(draw), seed)
        found = drift(drawn, word_vectors)
        assert found.is_certain
        # The strange ones are always told, the others half of the time.
        share = np.mean([prompt.endswith("q") for prompt in drawn.tested[0]])
        assert found.told.low < 0.5 + share / 2 < found.told.high
        assert all(word in STRANGE for prompt in found.farthest for word in prompt.split())
        assert found.words and set(found.words) <= set(STRANGE)


def test_known_words_in_another_order_are_told_by_their_pairs() -> None:
    draw = random.Random("order")
    after = dict(zip(KNOWN, KNOWN[1:] + KNOWN[:1], strict=True))

    prompts = [" ".join(f"{word} {after[word]}" for word in draw.choices(KNOWN, k=4)) for _ in range(100)]
    drawn = samples(prompts, [" ".join(draw.choices(KNOWN, k=300)) for _ in range(60)], 0)
    assert drift(drawn, partial(word_vectors, count=2)).told.low > 0.8
    assert not drift(drawn, word_vectors).is_certain


def test_pieces_are_as_long_as_the_prompts_and_from_all_of_the_data_alike() -> None:
    draw = random.Random(1)
    data = ["first " * 3000, "second " * 1500, "third " * 1500]
    prompts = [text(draw, KNOWN, draw.randint(1, 12)) for _ in range(400)]
    found = samples(prompts, data, 0)
    pieces = [piece for _, half in (found.learnt, found.tested) for piece in half]
    assert len(pieces) == 3 * len(prompts)
    assert {word for piece in pieces for word in piece.split()} == {"first", "second", "third"}, "whole words"
    own = [prompt for half, _ in (found.learnt, found.tested) for prompt in half]
    assert sorted(own) == sorted(prompts)
    assert np.mean([*map(len, pieces)]) == pytest.approx(np.mean([*map(len, own)]), rel=0.05)
    # What is tested is not from the blocks that were learnt from: two of "first", and one or two of each other one.
    chinese = samples(prompts, ["山水" * 6000] * 2, 0)
    assert max(len(piece) for piece in chinese.learnt[1]) <= max(map(len, prompts))


def test_the_classifier_is_ridge_regression_with_the_least_error_on_what_is_left_out() -> None:
    draw = np.random.default_rng(3)
    points = draw.normal(size=(40, 6))
    labels = np.sign(points[:, 0] + draw.normal(size=40))
    kernel = points @ points.T
    weights = points.T @ _dual_weights(kernel, labels)
    penalties = 10.0 ** np.arange(-3, 4) * np.linalg.eigvalsh(kernel).mean()

    def model(penalty: float) -> Ridge:
        return Ridge(alpha=penalty, fit_intercept=False)

    errors = [
        np.mean((labels - cross_val_predict(model(penalty), points, labels, cv=LeaveOneOut())) ** 2)
        for penalty in penalties
    ]
    assert weights == pytest.approx(model(penalties[int(np.argmin(errors))]).fit(points, labels).coef_)


def test_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="needs at least 20"):
        samples(["a word", " "] * 15, ["text"] * 10, 0)
    with pytest.raises(DataError, match="less than two texts"):
        samples(["a word"] * 30, ["text", "  "], 0)


def test_the_interval_of_a_probability_covers_it_19_times_of_20() -> None:
    draw = np.random.default_rng(0)
    for shift, true in ((0.0, 0.5), (1.0, 0.76025)):  # the normal distribution at shift / sqrt(2)
        inside = 0
        for _ in range(400):
            _, low, high = probability_above(draw.normal(shift, 1, 30), draw.normal(0, 1, 50))
            inside += low <= true <= high
        assert 0.925 <= inside / 400 <= 0.975
    ours, theirs = draw.integers(0, 5, 30), draw.integers(0, 4, 20)
    value, low, high = probability_above(ours, theirs)
    assert value == pytest.approx(roc_auc_score([1] * 30 + [0] * 20, [*ours, *theirs])) and low < value < high
    assert probability_above([2.0], [1.0])[::2] == (1.0, 1.0) and probability_above([2.0], [1.0])[1] < 0.5


def test_words_that_tell_texts_apart_are_the_planted_ones() -> None:
    draw = random.Random(2)
    common = ["the", "a", "of", "and", "to", "in", "is", "it", "for", "on"]
    texts = [f"{text(draw, common, 8)} {'Invoice' if number % 2 else 'refund'}" for number in range(40)]
    others = [text(draw, common, 9) for _ in range(200)]
    assert telling_words(texts, others) == ["invoice", "refund"]
    assert telling_words(others, others) == [] and telling_words(["once", *others], others) == []
