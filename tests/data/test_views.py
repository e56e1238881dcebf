from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import PackedBatches, TokenSplit
from sheepop.data.shards import DocumentView

documents_of_ids = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=9)


@given(documents_of_ids, st.data())
def test_a_view_reads_like_a_split_of_its_documents_alone(documents: list[list[int]], data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(documents) - 1), min_size=1)))
    split = TokenSplit.from_documents(documents)
    view = DocumentView(split, np.array(chosen))
    alone = TokenSplit.from_documents([documents[number] for number in chosen])
    assert view.offsets.tolist() == alone.offsets.tolist()
    start = data.draw(st.integers(0, view.num_tokens))
    stop = data.draw(st.integers(start, view.num_tokens))
    assert view.tokens(start, stop).tolist() == alone.tokens(start, stop).tolist()
    found = view.ranges(start, stop)
    assert [token for places in found for token in split.tokens(*places).tolist()] == alone.tokens(start, stop).tolist()
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))
    rows, expected = (PackedBatches(source, max_length=4, pad_id=0) for source in (view, alone))
    everything = np.arange(expected.num_samples)
    assert rows.batch(everything).labels.tolist() == expected.batch(everything).labels.tolist()


def test_what_is_not_in_a_view_is_refused() -> None:
    split = TokenSplit.from_documents([[1, 2], [3], [4]])
    for numbers in ([0, 3], [-1], [1, 1], [2, 0]):
        with pytest.raises(ValueError, match="ascend from 0 to 2"):
            DocumentView(split, np.array(numbers))
    with pytest.raises(IndexError, match="outside a view of 3"):
        DocumentView(split, np.array([0, 2])).tokens(1, 4)
