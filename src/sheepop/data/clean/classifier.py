"""A linear text classifier that a user trains on examples of their own: logistic regression on hashed word n-grams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sheepop.core.errors import DataError
from sheepop.core.files import write_atomic
from sheepop.core.random import Permutation, derive_seed
from sheepop.data.clean.evaluation_sets import hashed_words
from sheepop.data.duplicates.shingles import shingles_of_words

FORMAT = "sheepop.linear-text-classifier/1"
_PROBE = "The quick brown fox jumps over the lazy dog"
_MOST_FEATURES = 20_000
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Example:
    """A text and whether it belongs to the class that the classifier is to find."""

    text: str
    label: bool


@dataclass(frozen=True, slots=True)
class Training:
    """How a classifier is trained: stochastic gradient descent with AdaGrad's step sizes.

    `buckets` is the number of weights, a power of two, into which n-grams of up to `ngram` words are hashed;
    `learning_rate` the first step size; `l2` the penalty on weights.
    """

    buckets: int = 2**18
    ngram: int = 2
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.5
    l2: float = 1e-4
    seed: int = 0


class LinearClassifier:
    """The probability that a text belongs to a class: the logistic function of a weighted sum of its n-grams.

    A text counts as the set of its n-grams, each a bucket of equal value, scaled to length one.
    """

    def __init__(self, weights: Floats, bias: float, ngram: int) -> None:
        self.weights, self.bias, self.ngram = weights, bias, ngram

    def probability(self, text: str) -> float:
        """Between 0 and 1; that of the bias alone for a text without words."""
        found = features(text, self.weights.size, self.ngram)
        score = self.bias
        if found.size:
            score += float(self.weights[found].sum(dtype=np.float64)) / float(np.sqrt(found.size))
        return float(_logistic(np.array([score]))[0])

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file; equal classifiers give equal bytes."""
        # One entry, because the order of several is not fixed.
        header = {"classifier": json.dumps({"format": FORMAT, "ngram": self.ngram, "probe": _probe()})}
        tensors: dict[str, NDArray[Any]] = {"weights": self.weights, "bias": np.array([self.bias], dtype=np.float64)}
        write_atomic(path, save(tensors, metadata=header))

    @classmethod
    def load(cls, path: str | Path) -> LinearClassifier:
        """Reads what `save` wrote; raises `DataError` for any other file."""
        try:
            with safe_open(path, framework="numpy") as file:
                header = json.loads((file.metadata() or {}).get("classifier", "{}"))
                if header.get("format") != FORMAT or header.get("probe") != _probe():
                    raise DataError(
                        f"{path} is not a classifier that this version can read. Train one with train_classifier."
                    )
                weights, bias, ngram = file.get_tensor("weights"), file.get_tensor("bias"), int(header["ngram"])
        except FileNotFoundError:
            raise DataError(f"The classifier {path} does not exist.") from None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise DataError(f"The classifier {path} cannot be read: {error}.") from None
        if weights.ndim != 1 or bias.shape != (1,) or not 1 <= ngram <= 8 or weights.size & (weights.size - 1):
            raise DataError(f"The classifier {path} is damaged: its tensors have the wrong shapes.")
        if weights.dtype != np.float32 or not np.isfinite(weights).all() or not np.isfinite(bias).all():
            raise DataError(f"The classifier {path} is damaged: its weights are not finite numbers.")
        return cls(weights, float(bias[0]), ngram)


def features(text: str, buckets: int, ngram: int) -> NDArray[np.int64]:
    """The distinct buckets of the n-grams of 1 to `ngram` words of `text`, of its first 20,000 words."""
    hashes = hashed_words(text)[:_MOST_FEATURES]
    if not hashes.size:
        return np.empty(0, np.int64)
    grams = [shingles_of_words(hashes, "prose", words) for words in range(1, ngram + 1) if words <= hashes.size]
    return np.unique(np.concatenate(grams) & np.uint64(buckets - 1)).astype(np.int64)


def train_classifier(examples: Iterable[Example], training: Training = Training()) -> LinearClassifier:
    """A classifier trained on the examples; the same examples in the same order give the same one.

    Raises `DataError` when there are not two classes.
    """
    found = [(features(example.text, training.buckets, training.ngram), example.label) for example in examples]
    labels = np.array([label for _, label in found], dtype=np.float64)
    if not 0 < labels.sum() < labels.size:
        raise DataError("A classifier needs examples with label 1 and examples with label 0.")
    weights, scale = np.zeros(training.buckets), np.full(training.buckets, 1e-8)
    bias, bias_scale = 0.0, 1e-8
    for epoch in range(training.epochs):
        order = Permutation(labels.size, derive_seed(training.seed, "classifier", epoch))
        for first in range(0, labels.size, training.batch_size):
            chosen = order(np.arange(first, min(first + training.batch_size, labels.size)))
            batch = [found[index][0] for index in chosen]
            touched, gradient, bias_gradient = _gradient(batch, labels[chosen], weights, bias)
            gradient += training.l2 * weights[touched]
            scale[touched] += gradient**2
            weights[touched] -= training.learning_rate * gradient / np.sqrt(scale[touched])
            bias_scale += bias_gradient**2
            bias -= training.learning_rate * bias_gradient / bias_scale**0.5
    return LinearClassifier(weights.astype(np.float32), float(bias), training.ngram)


def _gradient(
    batch: Sequence[NDArray[np.int64]], labels: NDArray[np.float64], weights: NDArray[np.float64], bias: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """The buckets of a batch, and the gradient of the mean log loss over them and for the bias."""
    lengths = np.array([found.size for found in batch])
    buckets = np.concatenate(batch)
    owners = np.repeat(np.arange(len(batch)), lengths)
    norms = 1 / np.sqrt(np.maximum(lengths, 1))
    scores = np.bincount(owners, weights[buckets], minlength=len(batch)) * norms + bias
    errors = (_logistic(scores) - labels) / len(batch)
    touched, places = np.unique(buckets, return_inverse=True)
    gradient: NDArray[np.float64] = np.bincount(places, (errors * norms)[owners], touched.size).astype(np.float64)
    return touched, gradient, float(errors.sum())


def read_examples(paths: Iterable[str | Path]) -> Iterator[Example]:
    """The examples of JSONL files, one object ``{"text": ..., "label": 0 or 1}`` a line; raises `DataError`."""
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _example(line, f"{path}, line {number}")
        except OSError as error:
            raise DataError(f"The examples {path} cannot be read: {(error.strerror or '').lower()}.") from None


def _example(line: bytes, where: str) -> Example:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not valid JSON.") from None
    text, label = (record.get("text"), record.get("label")) if isinstance(record, dict) else (None, None)
    if not isinstance(text, str) or label not in (0, 1):
        raise DataError(f'{where}: an example must be an object with "text" and a "label" that is 0 or 1.')
    return Example(text, bool(label))


def _logistic(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow."""
    exponential = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1, exponential) / (1 + exponential)


def _probe() -> str:
    """Says how this version hashes words: with other hashes the weights would mean other words."""
    return " ".join(f"{value:016x}" for value in shingles_of_words(hashed_words(_PROBE), "prose", 2).tolist())
