"""A memory learns how far to trust its finds, from documents that training leaves out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from sheepop.data import PackedBatches
from sheepop.data.shards import DocumentView, TokenSplit
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.corpus_index import CorpusIndex
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.train import memory_gate
from sheepop.train.config import MemoryConfig
from sheepop.train.memory_documents import other_documents, reserved_documents
from sheepop.train.memory_gate import build_memory, observe
from sheepop.train.validation import validate

VOCABULARY, LENGTH = 40, 16
SETTINGS = MemoryConfig(longest=6)


@pytest.fixture(scope="module")
def split() -> TokenSplit:
    """Documents of sentences that are drawn from a few, with rare other tokens between them."""
    draw = np.random.default_rng(0)
    sentences = [draw.integers(0, VOCABULARY, 9) for _ in range(12)]
    documents = [
        np.concatenate(
            [
                part
                for _ in range(draw.integers(2, 6))
                for part in (sentences[draw.integers(12)], [draw.integers(VOCABULARY)])
            ]
        )
        for _ in range(200)
    ]
    return TokenSplit.from_documents(documents)


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(vocab_size=VOCABULARY, d_model=16, num_layers=1, num_heads=2, max_seq_len=LENGTH)
    return build_model(config, seed=1).eval()


def built(model: Transformer, split: TokenSplit, settings: MemoryConfig = SETTINGS) -> CorpusMemory:
    return build_memory(model, split, settings, seed=3, max_length=LENGTH, pad_id=0, precision="fp32")


def scored(model: Transformer, split: TokenSplit, memory: CorpusMemory | None) -> float:
    rows, ones = PackedBatches(split, max_length=LENGTH, pad_id=0), np.ones(VOCABULARY, dtype=np.int64)
    return validate(model, rows, ones, batch_size=8, precision="fp32", device="cpu", memory=memory).loss


def test_reserved_documents_are_a_fiftieth_at_most_and_training_has_all_others(split: TokenSplit) -> None:
    reserved = reserved_documents(split, SETTINGS, 3)
    size = sum(int(np.diff(split.offsets)[number]) for number in reserved)
    assert 0.8 * split.num_tokens / 50 < size <= split.num_tokens / 50
    assert list(reserved) == sorted(set(reserved.tolist()))
    others = other_documents(split, reserved)
    assert sorted([*reserved, *others.documents]) == list(range(200))
    assert np.array_equal(other_documents(others, reserved).documents, others.documents)
    few = reserved_documents(split, SETTINGS.replace(reserved_tokens=30), 3)
    assert 0 < sum(int(np.diff(split.offsets)[number]) for number in few) <= 30
    assert not len(reserved_documents(TokenSplit.from_documents([range(9)] * 3), SETTINGS, 3))


def test_a_memory_predicts_repeated_text_better_than_the_network_alone(split: TokenSplit, model: Transformer) -> None:
    draw = np.random.default_rng(0)
    sentences = [draw.integers(0, VOCABULARY, 9) for _ in range(12)]
    held_out = TokenSplit.from_documents([np.concatenate([sentences[n] for n in (5, 2, 11, 0)]), sentences[7]])
    memory = built(model, split)
    alone, together = scored(model, held_out, None), scored(model, held_out, memory)
    assert alone > 0.9 * math.log(VOCABULARY)  # the network is not trained
    # Eight of nine tokens follow from those before, the first one of a sentence is one of twelve.
    assert together < 0.5 * alone


def test_the_same_text_gives_the_same_memory_with_all_its_tokens(
    split: TokenSplit, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gate, "_LEAST_STEPS", 5)
    torch.manual_seed(5)
    one = built(model, split)
    torch.manual_seed(6)
    other = built(model, split)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    everything = np.bincount(split.tokens(0, split.num_tokens), minlength=VOCABULARY)
    assert torch.bincount(one.index.following, minlength=VOCABULARY).tolist() == everything.tolist()


def test_a_longer_text_is_held_in_part_in_whole_documents(
    split: TokenSplit, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gate, "_LEAST_STEPS", 5)
    memory = built(model, split, SETTINGS.replace(max_tokens=900))
    assert 800 < len(memory.index.following) <= 900


def test_the_loss_of_the_gate_is_that_of_all_corrected_logits(split: TokenSplit, model: Transformer) -> None:
    tokens = torch.from_numpy(split.tokens(0, 2000).astype(np.int32))
    torch.manual_seed(0)
    memory = CorpusMemory(CorpusIndex.build(tokens, VOCABULARY, 6))
    rows = PackedBatches(DocumentView(split, np.arange(150, 155)), max_length=LENGTH, pad_id=0)
    observed = observe(memory, model, rows, "fp32")
    found = float(observed.loss(memory, slice(None)))
    batch = rows.batch(np.arange(rows.num_samples))
    input_ids, positions, labels = (torch.from_numpy(each) for each in (batch.input_ids, batch.positions, batch.labels))
    with torch.no_grad():
        inputs = {name: torch.from_numpy(each) for name, each in batch.inputs().items()}
        logits = model(**inputs).flatten(0, 1).double()
        corrected = memory.double()(logits, memory.recall(input_ids, positions + 1))
        expected = functional.cross_entropy(corrected, labels.flatten(), ignore_index=-100)
        assert len(observed.logprobs) == batch.num_labels
        assert found == pytest.approx(float(expected), abs=1e-5)
