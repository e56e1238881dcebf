"""The cost formulas against torch's own counts: of floating-point operations, of numbers, of bytes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.model import ModelConfig, build_model
from sheepop.model.accounting.cost import (
    cache_bytes,
    decoding_flops_per_token,
    forward_flops_per_token,
    matrix_parameters,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
    step_flops,
    training_flops_per_token,
)
from sheepop.model.loss import cross_entropy

from ...reading import PieceReader
from ..architectures import ARCHITECTURES

BATCH, LENGTH, SOURCE = 2, 12, 7
PAIRS = [name for name, config in ARCHITECTURES.items() if config.architecture == "encoder_decoder"]
DECODERS = [name for name in ARCHITECTURES if name not in PAIRS]


@cache
def counted(name: str) -> tuple[int, int]:
    """Operations of the matrix products of one forward, and of forward and backward together.

    In float64, in which every expert's product is one of its own, and with attention that multiplies whole T x T
    squares: the counter sees nothing but ordinary products.
    """
    model = build_model(ARCHITECTURES[name].replace(attention_backend="eager"), seed=0).double()
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    sources = [torch.zeros(BATCH, SOURCE, dtype=torch.long)] if name in PAIRS else []
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(*sources, ids).double(), ids)
        forward = counter.get_total_flops()
        loss.backward()
        return forward, counter.get_total_flops()


def pairs_seen(config: ModelConfig, layer: int, length: int = LENGTH) -> int:
    """How many pairs of a query and a key a layer's mask lets through."""
    queries = torch.arange(length)[:, None]
    keys = torch.arange(length)
    allowed = keys <= queries
    window = config.window(layer)
    return int((allowed if window is None else allowed & (queries - keys < window)).sum())


def unneeded_flops(config: ModelConfig) -> int:
    """What the squares hold beyond the pairs that are seen."""
    attending = [layer for layer in range(config.num_layers) if config.mixer(layer) is None]
    # A score and a weighted value are two operations for each of their columns.
    widths = {layer: 2 * sum(config.heads(layer)[1:]) for layer in attending}
    unneeded = sum((LENGTH**2 - pairs_seen(config, layer)) * widths[layer] for layer in attending)
    return BATCH * unneeded * config.num_heads


def flops_of_chunks(config: ModelConfig) -> tuple[int, int]:
    """What the one chunk of each delta rule takes beyond its recurrence: of the forward pass, and of both."""
    delta = config.gated_delta_net
    if delta is None:
        return 0, 0
    heads, k, v = BATCH * len(delta.layers) * delta.num_value_heads, delta.key_head_dim, delta.value_head_dim
    pairs, state = LENGTH**2 * (4 * k + 2 * v), LENGTH * 2 * k * v
    # Nobody needs the state behind the chunk, or the gradient of that before it; the triangular system adds a product.
    forward, backward = pairs - state, 2 * pairs + LENGTH**2 * 2 * (k + v) - 4 * state
    return heads * forward, heads * (forward + backward)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_equal_those_counted(name):
    config = ARCHITECTURES[name]
    forward, training = counted(name)
    tokens, (in_forward, in_both) = BATCH * LENGTH, flops_of_chunks(config)
    assert forward_flops_per_token(config, LENGTH, SOURCE) * tokens == forward - unneeded_flops(config) - in_forward
    assert training_flops_per_token(config, LENGTH, SOURCE) * tokens == training - 3 * unneeded_flops(config) - in_both


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_costs_what_is_counted(is_frozen):
    """With labels at some of the tokens, and with adapters on frozen weights."""
    config = ARCHITECTURES["llama"]
    model = build_model(config.replace(attention_backend="eager"), seed=0)
    if is_frozen:
        add_lora(model, LoraConfig(rank=2, targets=("*_proj",)))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad) if is_frozen else None
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    labels = ids.clone()
    labels[:, LENGTH // 3 :] = -100
    # By itself the counter leaves out products that are added in place.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **others: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        supervised = model.hidden_states(ids)[labels != -100]
        torch.nn.functional.linear(supervised, model.lm_head.weight).sum().backward()
    tokens, count = BATCH * LENGTH, int((labels != -100).sum())
    found = step_flops(config, LENGTH, tokens, count, trained)
    # Nothing below the first adapters needs gradients, and autograd does not compute them.
    assert found == pytest.approx(counter.get_total_flops() - 3 * unneeded_flops(config), rel=0.05 if is_frozen else 0)


def test_a_source_is_as_long_as_its_target_unless_it_is_said():
    config = ARCHITECTURES["pairs"]
    assert forward_flops_per_token(config, LENGTH) == forward_flops_per_token(config, LENGTH, LENGTH)
    assert forward_flops_per_token(config, LENGTH) > forward_flops_per_token(config, LENGTH, SOURCE)


NAMES = [*PAIRS, "llama", "deepseek", "latent", "wide values", "gated convolutions", "delta nets"]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_behind_a_cache_costs_what_is_counted(name):
    config = ARCHITECTURES[name]
    model = build_model(config, seed=0).double().eval()
    memory = model.encode(torch.zeros(1, SOURCE, dtype=torch.long)) if name in PAIRS else None
    reader = PieceReader(model, 1, memory=memory)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        reader.read([torch.zeros(4, dtype=torch.long)])
        with FlopCounterMode(display=False) as counter:
            model.lm_head(reader.read([torch.tensor([1])])[0])
    assert decoding_flops_per_token(config, 5, SOURCE if memory else 0) == counter.get_total_flops()


# A token that attends to latents does other work than a whole sequence, which attends to keys.
@pytest.mark.parametrize("name", sorted({*DECODERS} - {"latent"}))
def test_a_sequence_costs_what_its_tokens_cost_one_by_one(name):
    config = ARCHITECTURES[name]
    tokens = [decoding_flops_per_token(config, context) for context in range(1, LENGTH + 1)]
    assert sum(tokens) == pytest.approx(forward_flops_per_token(config, LENGTH) * LENGTH, rel=1e-12)


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_the_pairs_counted_are_those_of_the_networks_mask(name):
    model = build_model(ARCHITECTURES[name].replace(attention_backend="eager"), seed=0)
    for layer, window in enumerate(model.windows):
        seen = int(model.attention_kind(window).sight(LENGTH).allowed().sum())
        assert seen == pairs_seen(model.config, layer)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_network(name):
    config = ARCHITECTURES[name]
    model = build_model(config, seed=0)
    named = dict(model.named_parameters())
    assert parameter_shapes(config) == {name: tuple(parameter.shape) for name, parameter in named.items()}
    assert num_parameters(config) == sum(parameter.numel() for parameter in named.values())


@pytest.mark.parametrize("name", sorted({*DECODERS} - {"dropout"}))
def test_the_parameters_of_a_token_are_those_that_its_forward_pass_reads(name):
    """An expert that a token was not sent to can be anything: here it is no number, and nothing shows it."""
    config = ARCHITECTURES[name]
    model = build_model(config, seed=0).train()
    token = torch.tensor([[7]])
    outputs = model.run(token)
    expected = model.read_out(outputs.hidden_states)
    active = sum(parameter.numel() for parameter in model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "bias" not in name and "taps" not in name]
    multiplying = sum(p.numel() for p in matrices if p is not model.embedding.weight and p.ndim < 4)
    if config.position_encoding == "learned":
        multiplying -= model.added_positions.table.numel()
    if config.tie_weights:
        multiplying += model.lm_head.weight.numel()
    if model.ngrams is not None:
        idle = torch.ones(len(model.ngrams.table), dtype=torch.bool).index_fill(
            0, model.ngrams.places(token).flatten(), 0
        )
        model.ngrams.table.data[idle] = torch.nan
        active -= model.ngrams.table[idle].numel()
        multiplying -= model.ngrams.table.numel()
    if model.layer_inputs is not None:
        table = model.layer_inputs.embedding.weight
        table.data[torch.arange(len(table)) != 7] = torch.nan
        active -= table[1:].numel()
        multiplying -= table.numel()
    for mixture, routing in zip(model.mixtures.values(), outputs.routings, strict=True):
        idle = sorted(set(range(config.experts.count)) - set(routing.chosen.flatten().tolist()))
        assert len(idle) == config.experts.count - config.experts.per_token
        for stacked in mixture.experts.parameters():
            stacked.data[idle] = torch.nan
            active -= stacked[idle].numel()
            multiplying -= stacked[idle].numel() if stacked.ndim == 3 else 0
    assert torch.equal(model(token), expected)
    assert num_active_parameters(config) == active
    assert matrix_parameters(config) == multiplying


@pytest.mark.parametrize("name", [*PAIRS, "llama", "wide values", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_holds_as_many_bytes(name, dtype):
    config = ARCHITECTURES[name]
    model = build_model(config, seed=0).to(dtype).eval()
    memory = model.encode(torch.zeros(3, SOURCE, dtype=torch.long)) if name in PAIRS else None
    reader = PieceReader(model, 3, memory=memory, num_blocks=3, size=LENGTH)
    with torch.no_grad():
        reader.read([torch.zeros(1, dtype=torch.long)] * 3)
    of_sources = [tensor for pair in reader.cache._memory.values() for tensor in pair]
    # Without the block that belongs to no text.
    of_blocks = [tensor[:-1] for blocks in (*reader.cache.keys, *reader.cache.values) for tensor in blocks.tensors]
    held = sum(tensor.nbytes for tensor in (*of_blocks, *of_sources))
    assert cache_bytes(config, 3, LENGTH, dtype.itemsize, SOURCE if memory else 0) == held


def test_gpt2_small_by_hand():
    # 12 layers of 12 * 768^2 weights and the head of 50257 * 768.
    assert matrix_parameters(ModelConfig(preset="gpt2")) == 12 * 12 * 768**2 + 50257 * 768
    assert num_parameters(ModelConfig(preset="gpt2")) == 124_439_808


def test_mixtral_8x7b_by_hand():
    """46.7 billion parameters, of which a token uses 12.9 billion (Jiang et al. 2024, "Mixtral of Experts")."""
    config = ModelConfig(
        vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, d_ff=14336, max_seq_len=64,
        position_encoding="rope", norm="rmsnorm", activation="swiglu", bias=False, tie_weights=False,
        experts={"count": 8, "per_token": 2},
    )  # fmt: skip
    expert, attention = 3 * 4096 * 14336, 2 * 4096 * (4096 + 1024)
    rest = 32 * (attention + 8 * 4096 + 2 * 4096) + 4096 + 2 * 32000 * 4096
    assert num_parameters(config) == 32 * 8 * expert + rest == 46_702_792_704
    assert num_active_parameters(config) == 32 * 2 * expert + rest == 12_879_925_248
