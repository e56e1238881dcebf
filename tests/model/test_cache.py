"""The key-value cache: running the network piece by piece equals running it on the whole text."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sheepop.model import KeyValueCache
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
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("given_positions", [True, False], ids=["positions", "default-positions"])
def test_left_padded_rows_equal_the_rows_alone(toy_network, encoding, given_positions):
    model = toy_network(position_encoding=encoding, num_kv_heads=2)
    rows = [tokens(9), tokens(4), tokens(6)]
    padding = torch.tensor([0, 5, 3])
    # The pad id is one that the texts may hold as well: the mask must not depend on it.
    padded = torch.stack([torch.cat((torch.full((9 - len(row),), 7), row)) for row in rows])
    positions = (torch.arange(9)[None] - padding[:, None]).clamp(min=0)
    cache = KeyValueCache(model.config, 3, 9, padding=padding)
    logits = []
    with torch.inference_mode():
        for start, end in ((0, 6), (6, 7), (7, 9)):
            given = {"positions": positions[:, start:end]} if given_positions else {}
            logits.append(model(padded[:, start:end], cache=cache, **given))
        for row, found, skipped in zip(rows, torch.cat(logits, dim=1), padding.tolist(), strict=True):
            torch.testing.assert_close(found[skipped:], model(row[None])[0], atol=1e-5, rtol=0)


def test_kept_rows_go_on_as_if_alone_in_their_new_order(toy_network):
    model = toy_network(position_encoding="rope", num_kv_heads=2)
    rows = [tokens(8), tokens(3), tokens(5)]
    padding = torch.tensor([0, 5, 3])
    padded = torch.stack([torch.cat((torch.zeros(8 - len(row), dtype=torch.long), row)) for row in rows])
    cache = KeyValueCache(model.config, 3, 10, padding=padding)
    with torch.inference_mode():
        model(padded, cache=cache)
        cache.keep_rows(torch.tensor([2, 1]))
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
        assert cache.length == 4
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
