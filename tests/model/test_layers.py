"""Norms and feed-forward networks that the worked examples leave out, against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.model import ModelConfig
from sheepop.model.feedforward import FeedForward
from sheepop.model.norms import build_norm


def test_rms_norm_divides_by_the_root_of_mean_square_plus_eps():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    norm = build_norm(ModelConfig(d_model=4, num_heads=1, norm="rmsnorm", norm_eps=7.5))
    # The mean square is 30 / 4 = 7.5.
    torch.testing.assert_close(norm(x), x / math.sqrt(15.0))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
    torch.testing.assert_close(norm(x), torch.tensor([1.0, 0.0, -3.0, 8.0]) / math.sqrt(15.0))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_network_without_biases_has_none(norm):
    names = [name for name, _ in build_norm(ModelConfig(norm=norm, bias=False)).named_parameters()]
    assert names == ["weight"]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("relu", [0.0, 0.0, 3.0]),
        ("gelu", [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in (-2.0, 0.0, 3.0)]),
        (
            "gelu_tanh",
            [v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2 for v in (-2.0, 0.0, 3.0)],
        ),
        # The gate is 5 x: silu(5 x) x.
        ("swiglu", [5 * value / (1 + math.exp(-5 * value)) * value for value in (-2.0, 0.0, 3.0)]),
    ],
)
def test_activations(activation, expected):
    layer = FeedForward(ModelConfig(d_model=1, num_heads=1, d_ff=1, bias=False, dropout=0.0, activation=activation))
    with torch.no_grad():
        layer.up_proj.weight.fill_(1.0)
        layer.down_proj.weight.fill_(1.0)
        if layer.gate_proj is not None:
            layer.gate_proj.weight.fill_(5.0)
    found = layer(torch.tensor([[-2.0], [0.0], [3.0]]))
    torch.testing.assert_close(found[:, 0], torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_the_clamped_swiglu_of_gpt_oss_by_hand() -> None:
    """Gates 1, 9 and -2, the second cut to 7; ups 2, 0.5 and -8, the last cut to -7."""
    config = ModelConfig(vocab_size=2, d_model=3, num_heads=1, d_ff=3, activation="swiglu_clamped", bias=False)
    layer = FeedForward(config)
    with torch.no_grad():
        layer.gate_proj.weight.copy_(torch.eye(3))
        layer.up_proj.weight.copy_(torch.diag(torch.tensor([2.0, 0.5 / 9, 4.0])))
        layer.down_proj.weight.copy_(torch.eye(3))
    gates, ups = [1.0, 7.0, -2.0], [2.0, 0.5, -7.0]
    expected = [g / (1 + math.exp(-1.702 * g)) * (1 + up) for g, up in zip(gates, ups, strict=True)]
    found = layer.eval()(torch.tensor([[[1.0, 9.0, -2.0]]]))
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6)
