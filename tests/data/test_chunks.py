from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import IGNORED_LABEL, PaddedBatches, TokenSplit

PAD = 0
documents_of_ids = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=25), min_size=1, max_size=6)
length_and_stride = st.integers(1, 10).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


def slow_chunks(document: list[int], length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of every chunk, until one reaches the end of the document."""
    chunks, start = [], 0
    while True:
        places = range(start, start + length)
        inputs = [document[p] if p < len(document) else PAD for p in places]
        labels = [document[p + 1] if p + 1 < len(document) else IGNORED_LABEL for p in places]
        chunks.append((inputs, labels))
        if start + length >= len(document):
            return chunks
        start += stride


@given(documents_of_ids, length_and_stride, st.randoms(use_true_random=False))
def test_rows_agree_with_a_loop(documents: list[list[int]], cut: tuple[int, int], random: object) -> None:
    length, stride = cut
    batches = PaddedBatches(TokenSplit.from_documents(documents), max_length=length, stride=stride, pad_id=PAD)
    expected = [chunk for document in documents for chunk in slow_chunks(document, length, stride)]
    assert batches.num_samples == len(expected)
    order = list(range(len(expected)))
    random.shuffle(order)  # type: ignore[attr-defined]
    batch = batches.batch(np.array(order))
    assert batch.input_ids.tolist() == [expected[i][0] for i in order]
    assert batch.labels.tolist() == [expected[i][1] for i in order]
    assert not batch.has_boundaries


@given(documents_of_ids, length_and_stride)
def test_count_once_predicts_every_token_once(documents: list[list[int]], cut: tuple[int, int]) -> None:
    length, stride = cut
    split = TokenSplit.from_documents(documents)
    batches = PaddedBatches(split, max_length=length, stride=stride, pad_id=PAD, count_once=True)
    labels = batches.batch(np.arange(batches.num_samples)).labels
    predicted = labels[labels != IGNORED_LABEL].tolist()
    assert predicted == [token for document in documents for token in document[1:]]


@given(documents_of_ids, st.integers(1, 10))
def test_with_the_default_stride_every_token_is_an_input_once(documents: list[list[int]], length: int) -> None:
    batches = PaddedBatches(TokenSplit.from_documents(documents), max_length=length, pad_id=PAD)
    inputs = batches.batch(np.arange(batches.num_samples)).input_ids
    assert inputs[inputs != PAD].tolist() == [token for document in documents for token in document]


def test_positions_and_document_ids_by_hand() -> None:
    batches = PaddedBatches(TokenSplit.from_documents([[1, 2, 3, 4, 5], [6]]), max_length=3, pad_id=PAD)
    batch = batches.batch(np.arange(3))
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize("stride", [0, 4, -1])
def test_a_stride_that_loses_tokens_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="stride must be from 1 to max_length = 3"):
        PaddedBatches(TokenSplit.from_documents([[1]]), max_length=3, stride=stride, pad_id=PAD)


def test_an_empty_split_has_no_samples() -> None:
    batches = PaddedBatches(TokenSplit.from_documents([]), max_length=3, pad_id=PAD)
    assert batches.num_samples == 0
    with pytest.raises(IndexError):
        batches.batch(np.array([0]))
