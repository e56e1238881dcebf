"""Gains of blocks, parts and outputs against full Jacobians, and those that are known by hand."""

from __future__ import annotations

import pytest
import torch

from sheepop.interpret.control.gains import gains
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.model import ModelConfig, build_model

from .conftest import SMALL, matrix, point_of


def test_every_gain_is_that_of_the_full_jacobian(point: OperatingPoint) -> None:
    found = gains(point, steps=40, probes=60)
    reached = torch.eye(40, dtype=torch.float64)
    for layer, own in enumerate(found.blocks):
        full = matrix(lambda x, layer=layer: point.run(layer, layer + 1, x[None])[0][0], point.states[layer])
        exact = torch.linalg.svdvals(full)
        assert own.block.largest == pytest.approx(float(exact[0]), rel=1e-4)
        assert own.block.smallest == pytest.approx(float(exact[-1]), rel=0.02)
        assert own.block.typical.value == pytest.approx(float(full.norm()) / 40**0.5, rel=0.06)
        reached = full @ reached
        assert own.reached.value == pytest.approx(float(reached.norm()) / 40**0.5, rel=0.06)
        assert [part.name for part in own.parts] == ["attention", "feed-forward", "attention norm", "feed-forward norm"]
        shares = torch.linalg.svd(full).Vh[0].view(5, 8).square().sum(1)
        assert own.focus == int(shares.argmax()) and own.focus_share == pytest.approx(float(shares.max()), abs=1e-3)
    assert found.whole.largest == pytest.approx(float(torch.linalg.svdvals(reached)[0]), rel=1e-4)
    assert found.product >= found.whole.largest
    head = matrix(point.read_in_nats, point.states[-1][-1:])
    assert found.head.largest == pytest.approx(float(torch.linalg.svdvals(head)[0]))
    whole = (head @ reached[-8:]).view(-1, 5, 8)
    torch.testing.assert_close(found.nats[0], whole.square().sum((0, 2)).div(8).sqrt(), rtol=0.25, atol=1e-6)
    torch.testing.assert_close(found.nats[-1, :-1], torch.zeros(4, dtype=torch.float64), atol=0, rtol=0)


def test_a_layer_norm_multiplies_by_one_over_the_deviation() -> None:
    """sigma_1 = 1 / sqrt(var + eps), for the token with the least variance, if all weights are 1."""
    point = point_of(build_model(ModelConfig(**SMALL), seed=0).double(), "sheep")
    found = {part.name: part for part in gains(point, steps=8, probes=4).blocks[1].parts}["attention norm"]
    variance = point.states[1].var(1, correction=0)
    assert found.largest == pytest.approx(float((variance + 1e-5).rsqrt().max()), rel=1e-6)


def test_words_and_tables_name_the_numbers(point: OperatingPoint) -> None:
    found = gains(point, steps=8, probes=4)
    data = found.to_dict()
    strongest = max(range(3), key=lambda layer: found.blocks[layer].block.largest)
    assert f"Block {strongest} multiplies by {found.blocks[strongest].block.largest:.3g} along" in data["sentences"][0]
    assert f"{found.blocks[2].block.largest:.3f}" in found.table()[3]
    assert data["blocks"][1]["block"]["spectrum"]["largest"][0]["value"] == found.blocks[1].block.largest
    lengths = [float(stream_TD.norm(dim=1).mean()) for stream_TD in point.states[1:3]]
    assert data["relative"][1] == pytest.approx(found.blocks[1].block.typical.value * lengths[0] / lengths[1])
    assert data["nats"] == found.nats.tolist() and data["product"] == found.product
    assert [picture.name for picture in found.pictures()] == ["gains_by_block", "gains_of_parts", "gains_in_nats"]


def test_one_token_has_gains() -> None:
    found = gains(point_of(build_model(ModelConfig(**SMALL), seed=0).double(), "s"), probes=4)
    assert found.blocks[0].focus == 0 and found.blocks[0].focus_share == pytest.approx(1.0)
