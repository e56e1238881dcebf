"""The key-value cache: running the network piece by piece equals running it on the whole text."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sheepop.model import KeyValueCache, ModelConfig, build_model
from sheepop.model.config import PositionEncoding

ENCODINGS = get_args(PositionEncoding)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 29, shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("pieces", [[1] * 12, [12], [5, 1, 1, 5], [1, 4, 7]], ids=str)
def test_incremental_equals_whole(toy_network, encoding, kv_heads, pieces):
    model = toy_network(position_encoding=encoding, num_kv_heads=kv_heads)
    input_ids = tokens(2, 12)
    cache = KeyValueCache(model.config, 2, 12)
    with torch.inference_mode():
        whole = model(input_ids)
        logits = [model(piece, cache=cache) for piece in input_ids.split(pieces, dim=1)]
    assert cache.lengths.tolist() == [12, 12]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("given_positions", [True, False], ids=["positions", "default-positions"])
def test_rows_of_different_length_equal_the_rows_alone(toy_network, encoding, given_positions):
    model = toy_network(position_encoding=encoding, num_kv_heads=2)
    rows = [tokens(9), tokens(4), tokens(6)]
    cache = KeyValueCache(model.config, 3, 9)
    begun, logits = [0, 0, 0], [[], [], []]
    with torch.inference_mode():
        # From the front; one row alone; pieces of each; and one that ends where the cache does, its padding behind it.
        for counts in ([4, 2, 3], [1, 0, 0], [1, 1, 1], [3, 1, 2]):
            padded = torch.full((3, max(counts)), 7)  # an id that the texts may hold as well
            for row, (start, count) in enumerate(zip(begun, counts, strict=True)):
                padded[row, :count] = rows[row][start : start + count]
            offsets = torch.arange(max(counts)).minimum(torch.tensor(counts)[:, None] - 1).clamp(min=0)
            given = {"positions": torch.tensor(begun)[:, None] + offsets} if given_positions else {}
            hidden = model.hidden_states(padded, cache=cache, counts=counts, **given)
            for row, count in enumerate(counts):
                logits[row].append(model.read_out(hidden)[row, :count])
            begun = [start + count for start, count in zip(begun, counts, strict=True)]
        assert cache.lengths.tolist() == begun == [9, 4, 6]
        for row, found in zip(rows, logits, strict=True):
            torch.testing.assert_close(torch.cat(found), model(row[None])[0], atol=1e-5, rtol=0)


def test_what_another_row_holds_changes_no_bit(toy_network):
    model = toy_network(position_encoding="alibi", num_kv_heads=2)
    piece, following = tokens(2, 6), tokens(2, 1)
    found = []
    with torch.inference_mode():
        for other in (0, 3):
            given, more = piece.clone(), following.clone()
            given[1] += other
            more[1] += other
            cache = KeyValueCache(model.config, 2, 8)
            model.hidden_states(given % 29, cache=cache, counts=[6, 3])
            found.append(model(more % 29, cache=cache)[0])
    assert torch.equal(*found)


def test_rows_of_one_length_need_no_mask(toy_network):
    model = toy_network()
    kind = model.attention_kind(cached=True)
    cache = KeyValueCache(model.config, 2, 9)
    masks = []
    for count in (5, 1, 1):
        cache.begin(count)
        masks.append(cache.prepare(kind).tensors)
        cache.advance()
    assert masks == [(), (), ()]
    cache.begin(1, [1, 0])
    cache.advance()
    cache.begin(1)
    assert [tuple(mask.shape) for mask in cache.prepare(kind).tensors] == [(2, 1, 1, 9)]


def test_kept_rows_go_on_as_if_alone_in_their_new_order(toy_network):
    model = toy_network(position_encoding="rope", num_kv_heads=2)
    rows = [tokens(8), tokens(3), tokens(5)]
    padded = torch.stack([torch.cat((row, torch.zeros(8 - len(row), dtype=torch.long))) for row in rows])
    cache = KeyValueCache(model.config, 3, 10)
    with torch.inference_mode():
        model.hidden_states(padded, cache=cache, counts=[8, 3, 5])
        cache.keep_rows([2, 1])
        following = torch.tensor([[3, 4], [5, 6]])
        found = model(following, cache=cache)
        for row, more, logits in zip((rows[2], rows[1]), following, found, strict=True):
            alone = model(torch.cat((row, more))[None])[0, -2:]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_the_networks_dtype_works_in_low_precision(toy_network, dtype):
    model = toy_network(position_encoding="rope").to(dtype)
    cache = KeyValueCache(model.config, 2, 12, dtype=dtype)
    input_ids = tokens(2, 12)
    with torch.inference_mode():
        whole = model(input_ids)
        steps = torch.cat([model(piece, cache=cache) for piece in input_ids.split(1, dim=1)], dim=1)
    assert steps.dtype == dtype
    torch.testing.assert_close(steps, whole, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=0)


def test_more_positions_than_the_capacity_are_refused_and_the_past_stays(toy_network):
    model = toy_network()
    cache = KeyValueCache(model.config, 1, 5)
    with torch.inference_mode():
        model(tokens(1, 4), cache=cache)
        with pytest.raises(ValueError, match="holds 5 positions; 6 were asked for"):
            model(tokens(1, 2), cache=cache)
        assert cache.lengths.tolist() == [4]
        torch.testing.assert_close(
            model(torch.tensor([[2]]), cache=cache)[:, -1],
            model(torch.cat((tokens(1, 4), torch.tensor([[2]])), dim=1))[:, -1],
            atol=1e-5,
            rtol=0,
        )


def test_a_batch_of_another_size_is_refused(toy_network):
    model = toy_network()
    with pytest.raises(ValueError, match="holds 2 sequences; 1 were given"):
        model(tokens(1, 4), cache=KeyValueCache(model.config, 2, 8))


@pytest.mark.parametrize("counts", [[4], [5, 1], [-1, 2]])
def test_counts_that_do_not_fit_are_refused(toy_network, counts):
    model = toy_network()
    with pytest.raises(ValueError, match="do not fit 2 rows of 4 tokens"):
        model.hidden_states(tokens(2, 4), cache=KeyValueCache(model.config, 2, 8), counts=counts)
    with pytest.raises(ValueError, match="counts tell a cache"):
        model.hidden_states(tokens(2, 4), counts=[4, 4])


def test_document_ids_and_a_cache_exclude_each_other(toy_network):
    model = toy_network()
    with pytest.raises(ValueError, match="document_ids are for packed training batches"):
        model(tokens(1, 4), cache=KeyValueCache(model.config, 1, 8), document_ids=torch.zeros(1, 4))


def test_positions_beyond_the_context_are_refused(toy_network):
    model = toy_network()
    cache = KeyValueCache(model.config, 1, 30)
    model(tokens(1, 20), cache=cache)
    with pytest.raises(ValueError, match="25 positions do not fit max_seq_len = 24"):
        model(tokens(1, 5), cache=cache)


def test_padding_never_takes_the_place_of_what_a_longer_row_holds() -> None:
    """The shorter row comes to the length of the other, which is given padding alone."""
    config = ModelConfig(vocab_size=19, d_model=16, num_layers=1, num_heads=2, max_seq_len=8, dropout=0.0)
    model = build_model(config, seed=0).double().eval()
    texts = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    cache = KeyValueCache(config, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        model(torch.where(torch.arange(5) < torch.tensor([[2], [5]]), texts[:, :5], 0), cache=cache, counts=[2, 5])
        model(torch.stack((texts[0, 2:5], torch.zeros(3, dtype=torch.long))), cache=cache, counts=[3, 0])
        assert cache.lengths.tolist() == [5, 5]
        torch.testing.assert_close(model(texts[:, 5:], cache=cache)[:, 0], model(texts)[:, 5], atol=1e-12, rtol=0)
