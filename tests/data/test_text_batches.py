from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import Batch, PackedBatches, PaddedBatches, TokenSplit
from sheepop.data.batches import IGNORED_LABEL
from sheepop.tokenizer import CharTokenizer

PAD = 0
documents_of_ids = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=15), min_size=1, max_size=10)


def shuffled(batches: PackedBatches | PaddedBatches, count: int, random: Random) -> tuple[Batch, list[int]]:
    """All `count` samples as one batch in some order, and that order."""
    assert batches.num_samples == count
    order = list(range(count))
    random.shuffle(order)
    return batches.batch(np.array(order)), order


def slow_rows(documents: list[list[int]], length: int) -> list[tuple[list[int], list[int], list[int], list[int], bool]]:
    """Inputs, labels, positions, document ids and boundary of every row, token by token."""
    stream = [(t, d, i == len(doc) - 1) for d, doc in enumerate(documents) for i, t in enumerate(doc)]
    rows = []
    for start in range(0, len(stream), length):
        inputs, labels, positions, ids = [], [], [], []
        segment, position, previous, boundary = -1, 0, None, False
        for place in range(start, start + length):
            token, document, is_last = stream[place] if place < len(stream) else (PAD, -1, True)
            if document != previous:
                boundary |= segment >= 0 and document >= 0
                segment, position, previous = segment + 1, 0, document
            inputs.append(token)
            labels.append(IGNORED_LABEL if is_last else stream[place + 1][0])
            positions.append(position)
            ids.append(segment)
            position += 1
        rows.append((inputs, labels, positions, ids, boundary))
    return rows


@given(documents_of_ids, st.integers(1, 12), st.randoms(use_true_random=False))
def test_rows_agree_with_a_loop_over_tokens(documents: list[list[int]], length: int, random: Random) -> None:
    batches = PackedBatches(TokenSplit.from_documents(documents), max_length=length, pad_id=PAD)
    expected = slow_rows(documents, length)
    batch, order = shuffled(batches, len(expected), random)
    assert batch.input_ids.tolist() == [expected[i][0] for i in order]
    assert batch.labels.tolist() == [expected[i][1] for i in order]
    assert batch.positions.tolist() == [expected[i][2] for i in order]
    assert batch.document_ids.tolist() == [expected[i][3] for i in order]
    assert batch.has_boundaries == any(row[4] for row in expected)
    for array in (batch.input_ids, batch.labels, batch.positions, batch.document_ids):
        assert array.dtype == np.int64 and array.shape == (len(order), length)


def test_by_hand() -> None:
    split = TokenSplit.from_documents([[11, 12, 3], [21, 3], [31, 32, 33, 34, 3]])
    batch = PackedBatches(split, max_length=4, pad_id=0).batch(np.arange(3))
    assert batch.input_ids.tolist() == [[11, 12, 3, 21], [3, 31, 32, 33], [34, 3, 0, 0]]
    assert batch.labels.tolist() == [[12, 3, -100, 3], [-100, 32, 33, 34], [3, -100, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert batch.has_boundaries
    assert batch.num_labels == 7


@given(documents_of_ids, st.integers(1, 12))
def test_every_token_is_predicted_once_but_the_first_of_each_document(documents: list[list[int]], length: int) -> None:
    batches = PackedBatches(TokenSplit.from_documents(documents), max_length=length, pad_id=PAD)
    labels = batches.batch(np.arange(batches.num_samples)).labels
    predicted = labels[labels != IGNORED_LABEL].tolist()
    assert predicted == [token for document in documents for token in document[1:]]


def test_padding_alone_is_no_boundary() -> None:
    batch = PackedBatches(TokenSplit.from_documents([[5, 6]]), max_length=4, pad_id=0).batch(np.array([0]))
    assert not batch.has_boundaries
    assert batch.document_ids.tolist() == [[0, 0, 1, 1]]


def test_a_row_that_ends_with_its_document_has_no_boundary() -> None:
    split = TokenSplit.from_documents([[1, 2, 3], [4, 5, 6]])
    assert not PackedBatches(split, max_length=3, pad_id=0).batch(np.array([0, 1])).has_boundaries


def test_samples_that_do_not_exist_are_refused() -> None:
    batches = PackedBatches(TokenSplit.from_documents([[1, 2, 3]]), max_length=2, pad_id=0)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="there are 2 samples"):
            batches.batch(np.array([index]))
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        PackedBatches(TokenSplit.from_documents([[1]]), max_length=0, pad_id=0)


documents_to_cut = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=25), min_size=1, max_size=6)
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


@given(documents_to_cut, length_and_stride, st.randoms(use_true_random=False))
def test_rows_agree_with_a_loop(documents: list[list[int]], cut: tuple[int, int], random: Random) -> None:
    length, stride = cut
    batches = PaddedBatches(TokenSplit.from_documents(documents), max_length=length, stride=stride, pad_id=PAD)
    expected = [chunk for document in documents for chunk in slow_chunks(document, length, stride)]
    batch, order = shuffled(batches, len(expected), random)
    assert batch.input_ids.tolist() == [expected[i][0] for i in order]
    assert batch.labels.tolist() == [expected[i][1] for i in order]
    assert not batch.has_boundaries


@given(documents_to_cut, length_and_stride)
def test_count_once_predicts_every_token_once(documents: list[list[int]], cut: tuple[int, int]) -> None:
    length, stride = cut
    split = TokenSplit.from_documents(documents)
    batches = PaddedBatches(split, max_length=length, stride=stride, pad_id=PAD, count_once=True)
    labels = batches.batch(np.arange(batches.num_samples)).labels
    predicted = labels[labels != IGNORED_LABEL].tolist()
    assert predicted == [token for document in documents for token in document[1:]]


@given(documents_to_cut, st.integers(1, 10))
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


def test_chunks_of_hi_world() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode("Hi, world")
    assert ids == [72, 105, 44, 32, 119, 111, 114, 108, 100]
    split = TokenSplit.from_documents([ids])
    batches = PaddedBatches(split, max_length=5, stride=5, pad_id=tokenizer.pad_id)
    batch = batches.batch(np.arange(batches.num_samples))
    assert batch.input_ids.tolist() == [[72, 105, 44, 32, 119], [111, 114, 108, 100, tokenizer.pad_id]]
    assert batch.labels.tolist() == [[105, 44, 32, 119, 111], [114, 108, 100, -100, -100]]
