"""Documents packed into one row give the logits, the loss and the gradients of the documents apart."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sheepop.model import IGNORE_INDEX
from sheepop.model.loss import cross_entropy_sum
from sheepop.model.options import PositionEncoding

LENGTHS = (7, 1, 4)


@pytest.mark.parametrize("encoding", get_args(PositionEncoding))
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_documents_equal_the_documents_apart(toy_network, encoding, kv_heads):
    model = toy_network(position_encoding=encoding, num_kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 29, (length,), generator=generator) for length in LENGTHS]
    labels = [torch.cat((document[1:], torch.tensor([IGNORE_INDEX]))) for document in documents]

    losses, logits = [], []
    for document, label in zip(documents, labels, strict=True):
        logits.append(model(document[None])[0])
        losses.append(cross_entropy_sum(logits[-1], label))
    apart = torch.stack(losses).sum()
    gradients_apart = torch.autograd.grad(apart, list(model.parameters()))

    packed_logits = model(
        torch.cat(documents)[None],
        positions=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        document_ids=torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])[None],
    )[0]
    packed = cross_entropy_sum(packed_logits, torch.cat(labels))
    gradients_packed = torch.autograd.grad(packed, list(model.parameters()))

    torch.testing.assert_close(packed_logits, torch.cat(logits), atol=1e-5, rtol=0)
    assert packed.item() == pytest.approx(apart.item(), abs=1e-5)
    for ours, theirs in zip(gradients_packed, gradients_apart, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_without_document_ids_the_second_document_sees_the_first(toy_network):
    model = toy_network()
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    joined = model(ids, positions=positions)
    apart = model(ids, positions=positions, document_ids=torch.tensor([[0, 0, 1, 1]]))
    assert torch.equal(joined[:, :2], apart[:, :2])
    assert (joined[:, 2:] - apart[:, 2:]).abs().max() > 1e-3
