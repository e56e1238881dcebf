"""Clipping of gradients, against the worked example."""

import pytest
import torch
from torch import nn

from sheepop.train import clip_gradients


def with_gradient(values: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_clipping_by_global_norm_gives_the_worked_values() -> None:
    parameters = [with_gradient([0.5]), with_gradient([0.8, 1.2])]
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx(1.526434, abs=1e-6)
    clipped = torch.cat([parameter.grad for parameter in parameters])
    assert clipped.tolist() == pytest.approx([0.327561, 0.524097, 0.786146], abs=1e-6)


def test_a_small_gradient_is_left_as_it_is() -> None:
    parameter = with_gradient([0.3, 0.4])
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])


def test_without_a_maximum_the_norm_is_measured_only() -> None:
    parameter = with_gradient([30.0, 40.0])
    assert clip_gradients([parameter], None).item() == pytest.approx(50.0)
    assert parameter.grad.tolist() == [30.0, 40.0]
