"""Scores of held-out text, against whole logits, and which of its samples are scored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sheepop.data import Batch, Batches, Corpus, PackedBatches
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.train import TokenScores, validate
from sheepop.train.tensor_batch import TensorBatch


class Watched:
    """Batches that remember which samples were asked for."""

    def __init__(self, batches: Batches) -> None:
        self.asked: list[int] = []
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        self.asked += sample_indices.tolist()
        return self._batches.batch(sample_indices)


@pytest.fixture(scope="module")
def batches(corpus: Corpus) -> PackedBatches:
    return PackedBatches(corpus.validation, max_length=16, pad_id=corpus.tokenizer().pad_id)


def network(corpus: Corpus, **settings: Any) -> Transformer:
    """With weights so large that its guesses differ."""
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 16, "initial_std": 0.5}
    return build_model(ModelConfig(vocab_size=corpus.tokenizer().vocab_size, **sizes, **settings), 0).eval()


def scores(model: Transformer, batches: Any, corpus: Corpus, **settings: Any) -> TokenScores:
    lengths = corpus.tokenizer().byte_lengths()
    return validate(model, batches, lengths, **{"batch_size": 3, "precision": "fp32", "device": "cpu", **settings})


@pytest.mark.parametrize("logit_soft_cap", [None, 2.0])
def test_scores_are_those_of_the_logits_that_the_model_gives(
    corpus: Corpus, batches: PackedBatches, logit_soft_cap: float | None
) -> None:
    model = network(corpus, logit_soft_cap=logit_soft_cap)
    found = scores(model, batches, corpus)
    batch = TensorBatch.from_numpy(batches.batch(np.arange(batches.num_samples)), "cpu")
    with torch.no_grad():
        logits = model.eval()(**batch.inputs).double().flatten(0, 1)
    labels = batch.labels.flatten()
    kept = labels != -100
    expected = F.cross_entropy(logits[kept], labels[kept]).item()
    assert found.tokens == int(kept.sum())
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert found.accuracy == pytest.approx((logits.argmax(-1) == labels)[kept].double().mean().item())


@pytest.mark.parametrize(
    ("share", "chosen"), [(1 / 3, [0.0]), (3, [0.0, 0.5, 1.0]), (5.5, [0.0, 0.25, 0.5, 0.75, 1.0])]
)
def test_a_bound_on_the_tokens_takes_samples_evenly_from_the_whole_split(
    corpus: Corpus, batches: PackedBatches, share: float, chosen: list[float]
) -> None:
    watched, last = Watched(batches), batches.num_samples - 1
    found = scores(network(corpus), watched, corpus, max_tokens=round(share * batches.tokens_per_sample))
    assert len(watched.asked) == len(chosen)
    assert all(abs(sample - place * last) <= 0.5 for sample, place in zip(watched.asked, chosen, strict=True))
    labels = batches.batch(np.array(watched.asked)).labels
    assert found.tokens == np.count_nonzero(labels != -100)


def test_a_bound_beyond_the_split_scores_each_sample_once(corpus: Corpus, batches: PackedBatches) -> None:
    watched, model = Watched(batches), network(corpus)
    bounded = scores(model, watched, corpus, max_tokens=10**9)
    assert watched.asked == list(range(batches.num_samples))
    assert bounded == scores(model, batches, corpus)


def test_a_model_in_training_mode_is_refused(corpus: Corpus, batches: PackedBatches) -> None:
    with pytest.raises(ValueError, match=r"scored in evaluation mode"):
        scores(network(corpus, dropout=0.5).train(), batches, corpus)


def test_every_sample_is_reported_as_finished_once(corpus: Corpus, batches: PackedBatches) -> None:
    finished: list[int] = []
    scores(network(corpus), batches, corpus, batch_size=4, on_batch=finished.append)
    whole, rest = divmod(batches.num_samples, 4)
    assert rest
    assert finished == [4] * whole + [rest]


def test_a_loss_too_large_for_the_exponential_has_an_infinite_perplexity(
    corpus: Corpus, batches: PackedBatches
) -> None:
    model = network(corpus)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    found = scores(model, batches, corpus)
    assert math.isfinite(found.loss) and found.loss > 1000
    assert found.perplexity == math.inf
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * found.tokens / found.bytes)


def test_a_split_without_a_supervised_token_scores_nothing(corpus: Corpus, batches: PackedBatches) -> None:
    class Unlabelled(Watched):
        def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
            found = super().batch(sample_indices)
            return replace(found, labels=np.full_like(found.labels, -100))

    found = scores(network(corpus), Unlabelled(batches), corpus)
    assert found == TokenScores(loss=0.0, perplexity=1.0, accuracy=0.0, bits_per_byte=0.0, tokens=0, bytes=0)
