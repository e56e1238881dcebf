"""Given any network SheepOp can build, when a later token changes, then no earlier logit does, to the last bit."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.model import Transformer
from sheepop.model.options import ACTIVATION_NAMES, NormKind, PositionEncoding

from ..reading import read_in_pieces

VOCAB, LENGTH = 29, 10
PRECISIONS = ("float32", "bfloat16", "autocast")
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 1, 2, 2, 2, 2, 2, 2, 2]])
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0], [0, 1, 0, 0, 1, 2, 3, 4, 5, 6]])


def run(model: Transformer, input_ids: Tensor, precision: str, **arguments: Any) -> Tensor:
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with torch.no_grad(), autocast:
        return model(input_ids, **arguments)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


ENCODINGS, NORMS, ACTIVATIONS = get_args(PositionEncoding), get_args(NormKind), list(ACTIVATION_NAMES)
ARCHITECTURES = {
    **{
        f"{encoding}-{kv_heads}kv": {
            "position_encoding": encoding,
            "num_kv_heads": kv_heads,
            "norm": NORMS[number % len(NORMS)],
            "activation": ACTIVATIONS[number % len(ACTIVATIONS)],
        }
        for number, (encoding, kv_heads) in enumerate(itertools.product(ENCODINGS, (4, 2, 1)))
    },
    "window": {"sliding_window": 3},
    "window-in-one-layer": {"position_encoding": "rope", "sliding_window": 2, "sliding_layers": [1]},
    "window-alibi": {"position_encoding": "alibi", "sliding_window": 4},
    "soft-caps": {"attention_soft_cap": 2.0, "logit_soft_cap": 5.0},
    "sinks": {"attention_sinks": True, "num_kv_heads": 2},
    "sinks-window": {"attention_sinks": True, "sliding_window": 3},
    "eager": {"attention_backend": "eager", "sliding_window": 5},
    "value-heads": {"value_head_dim": 6},
    "qk-norm": {"qk_norm": "width", "position_encoding": "rope", "rotary_fraction": 0.5},
    "post-norm": {"norm_position": "post"},
    "sandwich-parallel": {"norm_position": "sandwich", "parallel_residual": True, "qk_norm": "head"},
    "output-norm": {"norm_position": "output", "embedding_norm": True},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_later_token_never_changes_an_earlier_logit(toy_network, architecture, packed, precision):
    model = toy_network(d_model=16, **ARCHITECTURES[architecture])
    arguments = {"document_ids": DOCUMENTS, "positions": RESTARTING} if packed else {}
    before_ids, other_ids = tokens(0), tokens(1)
    before = run(model, before_ids, precision, **arguments)
    assert torch.isfinite(before).all()
    for cut in range(1, LENGTH):
        changed = torch.cat((before_ids[:, :cut], other_ids[:, cut:]), dim=1)
        after = run(model, changed, precision, **arguments)
        assert torch.equal(after[:, :cut], before[:, :cut])
        assert not torch.equal(after[:, cut:], before[:, cut:])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_document_never_changes_this_ones_logits(toy_network, encoding, precision):
    model = toy_network(position_encoding=encoding, num_kv_heads=2)
    before_ids, other_ids = tokens(0), tokens(1)
    before = run(model, before_ids, precision, document_ids=DOCUMENTS, positions=RESTARTING)
    for document in range(3):
        own = document == DOCUMENTS
        changed = torch.where(own, before_ids, other_ids)
        after = run(model, changed, precision, document_ids=DOCUMENTS, positions=RESTARTING)
        assert torch.equal(after[own], before[own])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_other_texts_and_later_tokens_change_no_state_of_a_text_in_the_cache(toy_network, encoding, precision):
    model = toy_network(position_encoding=encoding, num_kv_heads=2)
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
    lengths = [LENGTH, LENGTH - 2]

    def states(input_ids: Tensor) -> list[Tensor]:
        texts = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
        with torch.no_grad(), autocast:
            return read_in_pieces(model, texts, ([LENGTH - 2, LENGTH - 4], [1, 1], [1, 1]))

    before_ids, other_ids = tokens(0), tokens(1)
    before = states(before_ids)
    assert all(torch.isfinite(row).all() for row in before)
    for cut in range(3, LENGTH + 1):
        for row in range(2):
            changed = other_ids.clone()
            changed[row, :cut] = before_ids[row, :cut]
            assert torch.equal(states(changed)[row][:cut], before[row][:cut])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_causality_holds_for_any_packing_and_any_change(toy_network, data):
    encoding = data.draw(st.sampled_from(ENCODINGS))
    heads, kv_heads = data.draw(st.sampled_from([(4, 4), (4, 1), (6, 3), (1, 1)]))
    model = toy_network(position_encoding=encoding, num_heads=heads, num_kv_heads=kv_heads, head_dim=4)
    length = data.draw(st.integers(2, 14))
    ids = st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length)
    starts = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    document_ids = torch.tensor(starts).cumsum(0)[None]
    cut = data.draw(st.integers(1, length - 1))
    first, second = torch.tensor([data.draw(ids)]), torch.tensor([data.draw(ids)])
    second[:, :cut] = first[:, :cut]
    before = run(model, first, "float32", document_ids=document_ids)
    after = run(model, second, "float32", document_ids=document_ids)
    assert torch.equal(after[:, :cut], before[:, :cut])
