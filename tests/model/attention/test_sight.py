"""The rule of sight, entry by entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.model.attention.sight import Sight, number_documents


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_query_sees_what_the_rule_says(data) -> None:
    """``first(q) <= k <= q``, for windows, documents, the last places of a row, and rows of different length."""
    keys = data.draw(st.integers(1, 12))
    window = data.draw(st.none() | st.integers(1, 14))
    form = data.draw(st.sampled_from(["last", "documents", "starts"]))
    queries = keys if form == "documents" else data.draw(st.integers(1, keys))
    starts = torch.tensor(data.draw(st.lists(st.integers(0, keys - queries), min_size=2, max_size=2)))
    cuts = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * keys, max_size=2 * keys))).view(2, keys)
    documents = number_documents(cuts.long().cumsum(1)) if form == "documents" else None
    sight = Sight(queries, keys, window=window, documents=documents, starts=starts if form == "starts" else None)
    allowed = sight.allowed().expand(2, 1, queries, keys)
    firsts = sight.first_keys().expand(2, queries)
    for row in range(2):
        for t in range(queries):
            place = int(starts[row]) + t if form == "starts" else keys - queries + t
            seen = [
                k
                for k in range(keys)
                if k <= place
                and (window is None or place - k < window)
                and (documents is None or documents[row, k] == documents[row, place])
            ]
            assert allowed[row, 0, t].nonzero().flatten().tolist() == seen
            assert firsts[row, t] == seen[0]
    if sight.is_triangle:
        assert torch.equal(allowed[:, 0], torch.ones(2, keys, keys).tril().bool())
    if sight.is_everything:
        assert allowed.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": torch.zeros(2, 4)}, r"document_ids has shape \(2, 4\)"),
        ({"key_mask": torch.ones(5, dtype=torch.bool), "causal": False}, r"key_mask has shape \(5,\)"),
        ({"documents": torch.zeros(2, 5), "num_queries": 1}, "document_ids need every position as a query; got 1 of 5"),
        ({"key_mask": torch.ones(1, 5, dtype=torch.bool)}, "a key_mask is for bidirectional attention"),
        ({"causal": False, "window": 3}, "windows, documents and rows of different length are for causal attention"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Sight(**{"num_queries": 5, "num_keys": 5, **arguments})


def test_distances_are_taken_off_by_the_slope_of_the_head() -> None:
    added = Sight(1, 3).added(torch.tensor([0.5, 2.0]))
    assert added.flatten(0, 2).tolist() == [[-1.0, -0.5, 0.0], [-4.0, -2.0, 0.0]]
