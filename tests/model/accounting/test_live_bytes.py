"""The bytes of tensors that are alive, against what was allocated by hand."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sheepop.model.accounting.live_bytes import LiveBytes


def test_storages_count_once_while_they_are_alive_and_as_large_as_they_are() -> None:
    before = torch.zeros(10)
    with LiveBytes() as live:
        first = torch.ones(1000)
        view = first[:10].view(2, 5)
        assert live.now == live.peak == 4000
        second = first + before.sum()
        assert live.now == 4000 + 4000 + 40
        assert live.peak == 4000 + 4000 + 40 + 4  # the sum
        del first
        assert live.now == 8040
        second.untyped_storage().resize_(0)
        assert live.now == 4040
        del view
        assert live.now == 40
        third = torch.ones(500)
        assert live.now == 2040
        assert live.peak == 8044
        live.forget_peak()
        assert live.peak == 2040
        del third


def test_what_a_linear_layer_keeps_and_its_gradients_are_seen_as_they_come_and_go() -> None:
    """Also where there are no numbers: weight 32 x 64, inputs of 100 rows, the result and all gradients."""
    for mode in (FakeTensorMode(), torch.enable_grad()):
        with mode, LiveBytes() as live:
            weight = torch.zeros(32, 64, requires_grad=True)
            inputs = torch.zeros(100, 64, requires_grad=True)
            squares = (inputs @ weight.t()).square()
            assert live.now == 4 * (32 * 64 + 100 * 64 + 2 * 100 * 32)
            total = squares.sum()
            del squares
            torch.autograd.backward(total)
            assert live.now == 2 * 4 * (32 * 64 + 100 * 64) + 4
            # The product, 2 x and the gradient that is multiplied by it are there when the product's gradient is made.
            assert live.peak >= 4 * (32 * 64 + 100 * 64 + 4 * 100 * 32)
