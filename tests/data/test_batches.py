from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import Batch, PackedBatches, PaddedBatches, TokenSplit, batch_hash

documents_of_ids = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=15), min_size=1, max_size=8)


def packed(documents: list[list[int]], length: int) -> Batch:
    batches = PackedBatches(TokenSplit.from_documents(documents), max_length=length, pad_id=0)
    return batches.batch(np.arange(batches.num_samples))


@given(documents_of_ids, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_rows_cut_short_are_those_that_packing_makes_of_that_length(documents: list[list[int]], length: int) -> None:
    cut, short = packed(documents, 12).cut(length), packed(documents, length)
    count = len(short.input_ids)
    for name in ("input_ids", "labels", "positions", "document_ids"):
        assert getattr(cut, name)[:count].tolist() == getattr(short, name).tolist(), name
    # Whole rows of padding may follow; nothing in them counts.
    assert (cut.labels[count:] == -100).all() and (cut.input_ids[count:] == 0).all()
    assert cut.num_labels == packed(documents, 12).num_labels
    assert cut.has_boundaries or not short.has_boundaries


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 12 tokens cannot be cut into rows of 5"):
        packed([[1, 2]], 12).cut(5)


@given(documents_of_ids, st.integers(1, 5))
def test_rows_taken_apart_and_joined_are_the_batch(documents: list[list[int]], size: int) -> None:
    batch = packed(documents, 4)
    pieces = [batch.rows(slice(start, start + size)) for start in range(0, len(batch.labels), size)]
    joined = Batch.joined(pieces)
    assert batch_hash(joined) == batch_hash(batch)
    assert joined.positions.tolist() == batch.positions.tolist()


def test_a_piece_without_a_boundary_says_so() -> None:
    batch = packed([[1, 2, 3, 4], [5, 6], [7, 8]], 4)
    assert batch.has_boundaries
    assert [batch.rows(np.array([row])).has_boundaries for row in range(2)] == [False, True]
    padded = PaddedBatches(TokenSplit.from_documents([[5, 6, 7]]), max_length=4, pad_id=0).batch(np.array([0]))
    assert not padded.cut(2).has_boundaries


def test_the_hash_is_that_of_shape_tokens_labels_and_documents() -> None:
    batch = packed([[11, 12, 3], [21, 3]], 4)
    numbers = [2, 4, 11, 12, 3, 21, 3, 0, 0, 0]  # the shape, then the tokens row by row
    numbers += [12, 3, -100, 3, -100, -100, -100, -100, 0, 0, 0, 1, 0, 1, 1, 1]
    assert batch_hash(batch) == hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()


def test_the_hash_sees_every_part_and_the_order_of_rows() -> None:
    batch = packed([[11, 12, 3], [21, 3, 4, 5]], 4)
    others = [batch.rows(np.array([1, 0])), batch.cut(2)]
    for name in ("input_ids", "labels", "document_ids"):
        array = getattr(batch, name).copy()
        array[0, 0] += 1
        others.append(Batch(**{**vars(batch), name: array}))
    assert len({batch_hash(batch), *map(batch_hash, others)}) == 6
