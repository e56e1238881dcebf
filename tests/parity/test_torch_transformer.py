"""The encoder-decoder against `torch.nn.Transformer` with the same weights: states, logits and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sheepop.model import EncoderDecoder, ModelConfig, build_model

D_MODEL, HEADS, D_FF, ENCODER_LAYERS, DECODER_LAYERS, VOCABULARY = 32, 4, 48, 3, 2, 23
SOURCE_LENGTHS, TARGET_LENGTHS = (9, 4, 7), (3, 6, 5)


def our_network(*, norm_first: bool, activation: str, **settings: Any) -> EncoderDecoder:
    config = ModelConfig(
        architecture="encoder_decoder",
        vocab_size=VOCABULARY,
        d_model=D_MODEL,
        num_heads=HEADS,
        num_encoder_layers=ENCODER_LAYERS,
        num_layers=DECODER_LAYERS,
        d_ff=D_FF,
        max_seq_len=16,
        dropout=0.0,
        norm_position="pre" if norm_first else "post",
        final_norm=True,
        activation=activation,
        **settings,
    )
    model = build_model(config, seed=3)
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases that are not 0, norms that are not 1, attention that is not even.
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def their_network(*, norm_first: bool, activation: str) -> nn.Transformer:
    return nn.Transformer(
        D_MODEL,
        HEADS,
        ENCODER_LAYERS,
        DECODER_LAYERS,
        D_FF,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=norm_first,
    )


def their_names(model: EncoderDecoder) -> dict[str, list[str]]:
    """For every parameter of theirs those of ours that it holds, one below the other."""
    names = {}
    stacks = (
        ("encoder", "encoder_blocks", ENCODER_LAYERS, {"self_attn": "attention"}),
        ("decoder", "blocks", DECODER_LAYERS, {"self_attn": "attention", "multihead_attn": "cross_attention"}),
    )
    for theirs, ours, count, attentions in stacks:
        for layer in range(count):
            there, here = f"{theirs}.layers.{layer}", f"{ours}.{layer}"
            norms = [*attentions.values(), "feed_forward"]
            for kind in ("weight", "bias"):
                for their_attention, attention in attentions.items():
                    projections = [f"{here}.{attention}.{letter}_proj.{kind}" for letter in "qkv"]
                    names[f"{there}.{their_attention}.in_proj_{kind}"] = projections
                    names[f"{there}.{their_attention}.out_proj.{kind}"] = [f"{here}.{attention}.o_proj.{kind}"]
                names[f"{there}.linear1.{kind}"] = [f"{here}.feed_forward.up_proj.{kind}"]
                names[f"{there}.linear2.{kind}"] = [f"{here}.feed_forward.down_proj.{kind}"]
                for number, norm in enumerate(norms, start=1):
                    names[f"{there}.norm{number}.{kind}"] = [f"{here}.{norm}_norm.{kind}"]
    for kind in ("weight", "bias"):
        names[f"encoder.norm.{kind}"] = [f"encoder_norm.{kind}"]
        names[f"decoder.norm.{kind}"] = [f"final_norm.{kind}"]
    return names


def padding(lengths: tuple[int, ...]) -> Tensor:
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_states_and_gradients_equal_those_of_torch(norm_first: bool, activation: str, backend: str) -> None:
    ours = our_network(norm_first=norm_first, activation=activation, attention_backend=backend)
    theirs = their_network(norm_first=norm_first, activation=activation)
    names, parameters = their_names(ours), dict(ours.named_parameters())
    theirs.load_state_dict({name: torch.cat([parameters[own] for own in owns]) for name, owns in names.items()})

    generator = torch.Generator().manual_seed(2)
    source_padding, target_padding = padding(SOURCE_LENGTHS), padding(TARGET_LENGTHS)
    sources = torch.randint(VOCABULARY, source_padding.shape, generator=generator)
    targets = torch.randint(VOCABULARY, target_padding.shape, generator=generator)
    weights = torch.randn(*targets.shape, D_MODEL, generator=generator) * ~target_padding[..., None]

    embeddings = ours.embedding.weight.detach().clone().requires_grad_()
    table = ours.added_positions.table
    embedded = [
        nn.functional.embedding(ids, embeddings) * D_MODEL**0.5 + table[: ids.shape[1]] for ids in (sources, targets)
    ]
    length = targets.shape[1]
    expected = theirs(
        *embedded,
        tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
        src_key_padding_mask=source_padding,
        memory_key_padding_mask=source_padding,
        tgt_key_padding_mask=target_padding,
    )
    torch.autograd.backward((expected * weights).sum())

    found = ours.hidden_states(targets, source_ids=sources, source_mask=~source_padding)
    torch.autograd.backward((found * weights).sum())

    real = ~target_padding
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    for name, parameter in theirs.named_parameters():
        gradient = torch.cat([parameters[own].grad for own in names[name]])
        torch.testing.assert_close(
            gradient, parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    torch.testing.assert_close(ours.embedding.weight.grad, embeddings.grad, atol=1e-5, rtol=1e-4)
    compared = {own for owns in names.values() for own in owns}
    assert parameters.keys() - compared == {"embedding.weight"}


def test_logits_are_the_states_times_the_shared_embedding() -> None:
    model = our_network(norm_first=True, activation="relu")
    sources, targets = torch.randint(VOCABULARY, (2, 5)), torch.randint(VOCABULARY, (2, 4))
    states = model.hidden_states(targets, source_ids=sources)
    torch.testing.assert_close(model(sources, targets), states @ model.embedding.weight.T)
