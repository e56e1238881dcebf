"""Layers without attention, the gate of attention and that of shared experts, one token or one number at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import quantize
from sheepop.model import ModelConfig, build_model
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.mixers import GatedConvolution, GatedDeltaNet

SIZES: dict[str, Any] = {
    "vocab_size": 20, "d_model": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.0, "max_seq_len": 32
}  # fmt: skip
DELTA = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 3, "value_head_dim": 4, "width": 3}


def built(**choices: Any) -> nn.Module:
    model = build_model(ModelConfig(**{**SIZES, **choices}), seed=0).double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def test_a_gated_convolution_is_a_sum_over_the_last_tokens() -> None:
    model = built(gated_convolution={"layers": [0], "width": 3, "bias": True})
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, GatedConvolution)
    x_TD, taps = drawn(7, 16), mixer.convolution.taps
    b, c, x = (x_TD @ mixer.in_proj.weight.T + mixer.in_proj.bias).split(16, dim=-1)
    for t in range(7):
        summed = sum(taps[back] * b[t - back] * x[t - back] for back in range(3) if t >= back)
        wanted = mixer.o_proj.weight @ (c[t] * (summed + mixer.convolution.bias)) + mixer.o_proj.bias
        torch.testing.assert_close(mixer(x_TD[None])[0, t], wanted)


@torch.no_grad()
def test_a_gated_delta_net_is_its_equations() -> None:
    model = built(gated_delta_net={"layers": [1], **DELTA}, norm_eps=0.01)
    mixer = model.blocks[1].mixer
    assert isinstance(mixer, GatedDeltaNet)
    x_TD, found = drawn(6, 16), []
    states = torch.zeros(2, 3, 4, dtype=torch.float64)

    def convolved(name: str, t: int) -> Tensor:
        weight, taps = getattr(mixer, f"{name}_proj").weight, mixer.convolutions[name].taps
        summed = sum(taps[back] * (weight @ x_TD[t - back]) for back in range(3) if t >= back)
        return summed * summed.sigmoid()

    for t in range(6):
        q, k, v = convolved("q", t), convolved("k", t), convolved("v", t).view(2, 4)
        q, k = (each / (each.square().sum() + 1e-6).sqrt() for each in (q, k))
        alpha = (-mixer.decay.exp() * (1 + (mixer.decay_proj.weight @ x_TD[t] + mixer.decay_bias).exp()).log()).exp()
        beta = (mixer.beta_proj.weight @ x_TD[t]).sigmoid()
        heads = []
        for head in range(2):
            states[head] *= alpha[head]
            states[head] += torch.outer(k, beta[head] * (v[head] - states[head].T @ k))
            out = states[head].T @ q / 3**0.5
            heads.append(mixer.norm.weight * out / (out.square().mean() + 0.01).sqrt())
        gate = mixer.gate_proj.weight @ x_TD[t]
        found.append(mixer.o_proj.weight @ (torch.cat(heads) * gate * gate.sigmoid()))
    torch.testing.assert_close(mixer(x_TD[None])[0], torch.stack(found))


@torch.no_grad()
def test_gates_multiply_the_output_of_attention_and_that_of_shared_experts() -> None:
    experts = {"count": 4, "shared": 1, "d_ff": 8}
    gated = built(attention_output_gate=True, experts={**experts, "shared_gate": True})
    plain = build_model(ModelConfig(**SIZES, experts=experts), seed=0).double().eval()
    plain.load_state_dict({name: gated.state_dict()[name] for name in plain.state_dict()})
    x_BTD, heads = drawn(1, 5, 16), []
    for model in (gated, plain):
        attention = model.blocks[0].attention
        attention.o_proj = nn.Identity()
        kind = model.attention_kind()
        heads.append(attention(x_BTD, prepare_attention(kind, kind.sight(5))))
    gate = gated.blocks[0].attention.gate_proj
    torch.testing.assert_close(heads[0], heads[1] * (x_BTD @ gate.weight.T + gate.bias).sigmoid())
    with_gate, without = gated.blocks[0].feed_forward, plain.blocks[0].feed_forward
    share = (x_BTD @ with_gate.shared_gate[0]).sigmoid()[..., None]
    wanted = without(x_BTD)[0] - (1 - share) * without.shared(x_BTD)
    torch.testing.assert_close(with_gate(x_BTD)[0], wanted)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"gated_convolution": {"layers": [2]}}, r"gated_convolution\.layers names layer 2, but"),
        ({"gated_convolution": {"layers": [0, 0]}}, "names a layer twice"),
        ({"gated_convolution": {"layers": [0, 1]}}, "leave no layer with attention"),
        ({"gated_convolution": {"layers": [0]}, "gated_delta_net": {"layers": [0], **DELTA}}, "name the same layer"),
        (
            {"gated_delta_net": {"layers": [0], **DELTA}, "sliding_window": 4, "sliding_layers": [0]},
            "sliding_layers names layer 0, which has no attention",
        ),
        ({"gated_delta_net": {"layers": [0], **DELTA, "num_value_heads": 3, "num_key_heads": 2}}, "does not divide"),
        ({"gated_convolution": {"layers": [0]}, "architecture": "encoder_decoder"}, "applies to architecture: decoder"),
        ({"experts": {"count": 2, "shared_gate": True}}, r"shared_gate needs experts\.shared"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**{**SIZES, **choices})


def test_initial_weights_of_convolutions_are_the_identity_and_decays_are_spread() -> None:
    model = build_model(
        ModelConfig(**{
            **SIZES, "num_layers": 3, "gated_convolution": {"layers": [0], "bias": True},
            "gated_delta_net": {**DELTA, "layers": [2], "num_value_heads": 64},
        }),
        seed=3,
    )  # fmt: skip
    convolution, delta = model.blocks[0].mixer.convolution, model.blocks[2].mixer
    x = torch.randn(1, 5, 16)
    assert torch.equal(convolution(x), x)
    rates = delta.decay.detach().exp()
    assert 0.009 < rates.min() < 2
    assert 14 < rates.max() < 16.001
    assert (delta.decay_bias == 1).all()
    assert (delta.norm.weight == 1).all()
    assert torch.equal(build_model(model.config, seed=3).blocks[2].mixer.decay, delta.decay)


@torch.no_grad()
def test_lora_and_quantisation_take_the_matrices_of_a_mixer() -> None:
    choices = {"gated_convolution": {"layers": [0]}, "gated_delta_net": {"layers": [2], **DELTA}}
    model = build_model(ModelConfig(**{**SIZES, "num_layers": 3, "d_model": 32, **choices}), seed=0).eval()
    ids = torch.arange(20)[None]
    expected = model(ids)
    rounded = quantize(model, "int8")(ids)
    assert 0 < (rounded - expected).abs().max() < 0.05 * expected.abs().max()
    changed = model.sharing_copy()
    add_lora(changed, LoraConfig(targets=("mixer.*",)))
    assert torch.equal(changed(ids), expected)
    names = [name for name, _ in changed.named_parameters() if "blocks.2" in name and name.endswith("down")]
    assert len(names) == 7
