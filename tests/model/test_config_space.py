"""Any configuration either works in every way in which a network is run, or is refused in words."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy
from sheepop.model.options import ACTIVATION_NAMES, Initialization, NormKind, NormPosition, PositionEncoding

from ..config_space import LENGTH, VOCAB, valid_settings
from ..reading import read_in_pieces

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [5, 5, 5, 2, 5, 5, 5, 5, 5, 5]])
STARTS = [[0, 4, 10], [0, 3, 4, 10]]


def check_training(model: Transformer) -> None:
    """Whole rows and packed ones, in float32: a finite loss, and a finite gradient in every parameter.

    Experts that no token chose share their tensor with those that were chosen; theirs is a zero there.
    """
    for arguments in ({}, {"document_ids": DOCUMENTS}):
        model.train().zero_grad()
        loss = cross_entropy(model(IDS, **arguments), IDS.roll(-1, 1))
        loss.backward()
        assert torch.isfinite(loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad.to_dense()).all(), name


def check_generation(model: Transformer) -> None:
    """Contexts of seven and of four tokens, and three tokens more: with the cache as without."""
    texts = [IDS[0], torch.cat((IDS[1, :4], IDS[1, 7:]))]
    with torch.inference_mode():
        found = read_in_pieces(model, texts, ([7, 4], [1, 1], [1, 1], [1, 1]))
        for text, states in zip(texts, found, strict=True):
            torch.testing.assert_close(states, model.hidden_states(text[None])[0], atol=1e-9, rtol=0)


def check_causality(model: Transformer) -> None:
    """Later tokens change no earlier logit, and a document's logits are those of the document alone."""
    with torch.inference_mode():
        before, packed = model(IDS), model(IDS, document_ids=DOCUMENTS, positions=positions())
        for cut in (1, 4, 9):
            changed = torch.cat((IDS[:, :cut], (IDS[:, cut:] + 3) % VOCAB), dim=1)
            torch.testing.assert_close(model(changed)[:, :cut], before[:, :cut], atol=1e-9, rtol=0)
        for row, starts in enumerate(STARTS):
            for start, end in itertools.pairwise(starts):
                alone = model(IDS[row, start:end][None])[0]
                torch.testing.assert_close(packed[row, start:end], alone, atol=1e-9, rtol=0)


def positions() -> Tensor:
    rows = [[t - max(start for start in starts if start <= t) for t in range(LENGTH)] for starts in STARTS]
    return torch.tensor(rows)


def check_works(config: ModelConfig) -> None:
    model = build_model(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    check_training(model)
    # In float64 no rounding can send a token to another expert.
    model.double().eval()
    check_generation(model)
    check_causality(model)


@settings(max_examples=100, suppress_health_check=[HealthCheck.data_too_large])
@given(keys=valid_settings())
def test_every_valid_configuration_trains_generates_and_is_causal(keys: dict[str, Any]) -> None:
    check_works(validate(ModelConfig, keys))


JUNK = (None, 0, 1, -1, 3, 1.5, 0.0, -0.5, True, False, "", "x", [], [0], [0, 0], [7], {}, 10**400, float("nan"), 1e300)
OTHERS: dict[str, tuple[Any, ...]] = {
    "num_heads": (5, 12),
    "num_kv_heads": (4, 5),
    "head_dim": (3, 5),
    "position_encoding": get_args(PositionEncoding),
    "position_base": (100.0,),
    "rotary_fraction": (0.1, 0.9),
    "rotary_scaling": (
        {"kind": "yarn", "factor": 2},
        {"kind": "linear", "factor": 2, "beta_fast": 3},
        {"kind": "llama3", "factor": 2, "original_max_seq_len": 9, "low_freq_factor": 5},
        {"kind": ["ntk"], "factor": 2},
        {"kind": "ntk"},
        {"kind": "longrope", "factor": 2, "original_max_seq_len": 9, "pair_factors": [1.0]},
        {"kind": "longrope", "factor": 2, "original_max_seq_len": 1, "pair_factors": [1.0, 2.0, 3.0, 4.0]},
    ),
    "sliding_layers": ([0], [9], [0, 0]),
    "sliding_position_base": (50.0, 1.0),
    "rotary_layers": ([0], [9], [0, 0]),
    "shared_norm": (True,),
    "experts": ({"count": 2, "per_token": 3}, {"count": 3, "layers": [8]}, {"count": 1}, {"number": 3}),
    "norm": get_args(NormKind),
    "norm_position": get_args(NormPosition),
    "activation": (*ACTIVATION_NAMES, ["gelu"]),
    "parallel_residual": (True,),
    "attention_backend": ("sdpa", "flex", "flash"),
    "attention_soft_cap": (0.5,),
    "initialization": get_args(Initialization),
    "mup_base_head_dim": (4,),
    "attention_scale": (0.2,),
    "num_encoder_layers": (2,),
    "preset": ("gpt5", ["gpt2"]),
}
UNTOUCHED = {"architecture", "vocab_size"}
KEYS = [name for name in ModelConfig.model_fields if name not in UNTOUCHED]


@st.composite
def changed_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid keys of which one to three are given another value, of the right kind or of none."""
    keys = draw(valid_settings())
    for name in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)):
        keys[name] = draw(st.sampled_from(OTHERS.get(name, ()) + JUNK))
    return keys


@settings(max_examples=200, suppress_health_check=[HealthCheck.data_too_large])
@given(keys=changed_settings())
@example({"activation": ["gelu"]})
@example({"d_model": 10**400})
def test_any_other_configuration_is_refused_in_words(keys: dict[str, Any]) -> None:
    try:
        config = validate(ModelConfig, keys)
    except ConfigError as error:
        message = str(error)
        note(message)
        assert any(name in message for name in keys)
        assert len(message.split()) > 3
        return
    if config.attention_backend == "flex":
        with pytest.raises(ConfigError, match="flex needs an NVIDIA GPU"):
            build_model(config, 0).eval()(IDS)
    elif _small(config) and not _extreme(config):
        check_works(config)


def _small(config: ModelConfig) -> bool:
    return config.max_seq_len >= LENGTH and config.vocabulary == VOCAB


def _extreme(config: ModelConfig) -> bool:
    """Whether a number is allowed that drowns or explodes what float32 can hold."""
    numbers = (
        config.embedding_scale, config.norm_eps, config.attention_scale, config.initial_std, config.residual_scale,
        config.logit_scale,
    )  # fmt: skip
    return any(number is not None and not 1e-6 <= number <= 1e3 for number in numbers)
