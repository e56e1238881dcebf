"""The network against transformers' GPT-2 and Llama, with the same weights, at toy size."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model import ModelConfig, Transformer, build_model, cross_entropy

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 61, 12


def turned(tensor: Tensor) -> Tensor:
    """A Conv1D weight (in, out) as a Linear's (out, in); a bias as it is."""
    return tensor.T if tensor.ndim == 2 else tensor


def named_gpt2(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """GPT-2's tensors (weights or gradients) under our names: Conv1D transposed, the fused projection split."""
    ours = {
        "embedding.weight": tensors["transformer.wte.weight"],
        "added_positions.table": tensors["transformer.wpe.weight"],
    }
    plain = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
    transposed = {
        "attention.o_proj": "attn.c_proj",
        "feed_forward.up_proj": "mlp.c_fc",
        "feed_forward.down_proj": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = tensors[f"transformer.ln_f.{kind}"]
        for layer in range(config.num_layers):
            here, there = f"blocks.{layer}", f"transformer.h.{layer}"
            for name, theirs in plain.items():
                ours[f"{here}.{name}.{kind}"] = tensors[f"{there}.{theirs}.{kind}"]
            for name, theirs in transposed.items():
                ours[f"{here}.{name}.{kind}"] = turned(tensors[f"{there}.{theirs}.{kind}"])
            fused = turned(tensors[f"{there}.attn.c_attn.{kind}"])
            for letter, part in zip("qkv", fused.chunk(3, dim=0), strict=True):
                ours[f"{here}.attention.{letter}_proj.{kind}"] = part
    return ours


def named_llama(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Llama's tensors under our names; both halves of a rotated pair stand C/2 columns apart in each."""
    ours = {"embedding.weight": tensors["model.embed_tokens.weight"], "final_norm.weight": tensors["model.norm.weight"]}
    if not config.tie_weights:
        ours["lm_head.weight"] = tensors["lm_head.weight"]
    same = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    same |= {f"attention.{letter}_proj": f"self_attn.{letter}_proj" for letter in "qkvo"}
    same |= {f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for layer in range(config.num_layers):
        for name, theirs in same.items():
            ours[f"blocks.{layer}.{name}.weight"] = tensors[f"model.layers.{layer}.{theirs}.weight"]
    return ours


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew, so that no bias is 0, no norm 1 and no weight too small to matter."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.15 * noise)
    return model


def assert_same_logits_and_gradients(theirs: nn.Module, ours: Transformer, named) -> None:
    weights = named({name: tensor.detach() for name, tensor in theirs.named_parameters()}, ours.config)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    logits = ours(ids)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

    expected_loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected_loss.backward()
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    loss = cross_entropy(logits, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-6)
    gradients = named({name: parameter.grad for name, parameter in theirs.named_parameters()}, ours.config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=lambda m, n=name: n + m)


def test_gpt2():
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=3, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    config = ModelConfig(
        preset="gpt2", vocab_size=VOCAB, d_model=32, num_layers=3, num_heads=4, max_seq_len=16, dropout=0.0
    )
    assert_same_logits_and_gradients(randomised(theirs), build_model(config, seed=0), named_gpt2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("base", "head_dim"), [(10000.0, 8), (500.0, 8), (500000.0, 12)])
def test_llama(kv_heads, tied, base, head_dim):
    rope = {"rope_theta": base}
    if int(transformers.__version__.split(".")[0]) >= 5:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=16, rms_norm_eps=1e-5,
            tie_word_embeddings=tied, attention_dropout=0.0, **rope,
        )
    )  # fmt: skip
    assert theirs.model.rotary_emb.inv_freq[1].item() == pytest.approx(base ** (-2 / head_dim))
    config = ModelConfig(
        preset="llama-1m", vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=kv_heads,
        head_dim=head_dim, max_seq_len=16, position_base=base, tie_weights=tied,
    )  # fmt: skip
    assert_same_logits_and_gradients(randomised(theirs), build_model(config, seed=0), named_llama)
