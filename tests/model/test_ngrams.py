"""Embeddings of hashed n-grams, against a loop over plain integers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sheepop.model import ModelConfig, build_model
from sheepop.model.ngrams import NgramEmbedding
from sheepop.model.sections import NgramConfig

from .slow_network import ngram_row


def slow_places(ids: list[int], orders: Sequence[int], rows: int) -> list[list[int]]:
    padded = [None] * 8 + list(ids)
    return [
        [ngram_row(padded[end : end - order : -1], rows) + table * rows for end in range(8, len(padded))]
        for table, order in enumerate(orders)
    ]


@pytest.mark.parametrize("orders", [(2,), (2, 3), (3, 5, 8)], ids=str)
@pytest.mark.parametrize("rows", [1, 97, 65_536])
def test_places_are_those_of_plain_integers(orders: tuple[int, ...], rows: int) -> None:
    embedding = NgramEmbedding(NgramConfig(orders=orders, rows=rows), 4)
    ids = torch.randint(0, 100_000, (2, 21), generator=torch.Generator().manual_seed(1))
    found = embedding.places(ids)
    for row in range(2):
        assert found[:, row].tolist() == slow_places(ids[row].tolist(), orders, rows)


def test_an_ngram_begins_where_its_document_begins() -> None:
    embedding = NgramEmbedding(NgramConfig(orders=(2, 4), rows=1000), 4)
    ids = torch.randint(0, 50, (1, 15), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 4 + [1] * 2 + [2] * 9])
    whole = embedding.places(ids, documents)
    parts = [embedding.places(part) for part in ids.split([4, 2, 9], dim=1)]
    assert torch.equal(whole, torch.cat(parts, dim=2))


def test_the_vectors_of_all_orders_are_added_and_the_gradient_has_their_rows_alone() -> None:
    embedding = NgramEmbedding(NgramConfig(orders=(2, 3), rows=30), 4)
    torch.nn.init.normal_(embedding.table, generator=torch.Generator().manual_seed(3))
    ids = torch.randint(0, 9, (3, 7), generator=torch.Generator().manual_seed(4))
    found = embedding(ids)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    (found * weights).sum().backward()
    expected, gradient = torch.zeros(3, 7, 4), torch.zeros(60, 4)
    for row in range(3):
        for places in slow_places(ids[row].tolist(), (2, 3), 30):
            for column, place in enumerate(places):
                expected[row, column] += embedding.table.detach()[place]
                gradient[place] += weights[row, column]
    torch.testing.assert_close(found.detach(), expected)
    assert embedding.table.grad is not None
    assert embedding.table.grad.is_sparse
    torch.testing.assert_close(embedding.table.grad.to_dense(), gradient)


def test_few_ngrams_of_a_text_share_a_row() -> None:
    """Ten thousand n-grams in a million rows: by chance 50 pairs meet, and 100 are nine standard deviations away."""
    embedding = NgramEmbedding(NgramConfig(orders=(2, 3), rows=1_000_000), 1)
    first, second = torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij")
    ids = torch.stack((first.flatten(), second.flatten()), dim=1)
    for places in embedding.places(ids)[:, :, 1]:
        assert 10_000 - len(places.unique()) < 100


def test_a_new_network_is_the_one_without_ngrams() -> None:
    sizes = {"vocab_size": 20, "d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 12, "dropout": 0.0}
    plain = build_model(ModelConfig(**sizes), 0)
    more = build_model(ModelConfig(**sizes, ngrams={"rows": 64}, short_convolution=3), 0)
    ids = torch.arange(12)[None]
    assert torch.equal(plain(ids), more(ids))
    with torch.no_grad():
        torch.nn.init.normal_(more.ngrams.table)
    assert not torch.equal(plain(ids), more(ids))


@pytest.mark.parametrize("orders", [(3, 2), (2, 2), (), (1,), (9,)], ids=str)
def test_orders_that_mean_nothing_are_refused(orders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="orders"):
        NgramConfig(orders=orders)
