"""Native blocks against the network in float64: every norm, activation, kind of heads and of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.adapt.native_products import with_native_products
from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import has_kernels
from sheepop.generate.blocks import BlockManager, Chunk
from sheepop.generate.config import CacheDtype
from sheepop.generate.native_block import NativeBlock, with_native_blocks
from sheepop.generate.paged_cache import PagedCache, reaches_of
from sheepop.model import Transformer
from sheepop.model.block import Block
from sheepop.model.probe import record

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler for the kernels")

NETWORKS: dict[str, dict[str, Any]] = {
    "layer norm, gelu": {"norm": "layernorm", "activation": "gelu"},
    "layer norm without bias": {"norm": "layernorm", "norm_bias": False, "activation": "gelu_tanh"},
    "norm behind the sum": {"norm": "layernorm", "norm_position": "post", "activation": "relu"},
    "norms on both sides": {"norm": "rmsnorm_zero_centered", "norm_position": "sandwich", "activation": "geglu_tanh"},
    "norms behind": {"norm": "rmsnorm", "norm_position": "output", "activation": "relu_squared"},
    "parallel branches": {"norm": "layernorm", "parallel_residual": True, "activation": "swiglu"},
    "a shared norm": {"norm": "layernorm", "parallel_residual": True, "shared_norm": True, "norm_bias": False},
    "scaled branches": {"norm": "rmsnorm", "norm_position": "sandwich", "residual_scale": 0.3},
    "scaled branches that share a norm": {
        "parallel_residual": True,
        "shared_norm": True,
        "residual_scale": 0.3,
        "experts": {"count": 4, "shared": 1},
    },
    "grouped, rotary": {"num_kv_heads": 2, "position_encoding": "rope", "activation": "geglu", "qk_norm": "head"},
    "half of a head rotated": {"position_encoding": "rope", "rotary_fraction": 0.5, "qk_norm": "width"},
    "alibi, window": {"position_encoding": "alibi", "sliding_window": 5, "bias": False},
    "sinks, cap, scale": {"attention_sinks": True, "attention_soft_cap": 4.0, "attention_scale": 0.4},
    "wide values": {"value_head_dim": 12, "norm": "rmsnorm"},
    "experts": {"experts": {"count": 5, "per_token": 2}, "activation": "swiglu"},
    "one expert, not gated": {"experts": {"count": 3, "per_token": 1, "normalize": False}, "activation": "gelu"},
    "groups of experts": {
        "activation": "swiglu",
        "experts": {
            "count": 6,
            "groups": 3,
            "groups_per_token": 2,
            "group_top": 2,
            "scores": "sigmoid",
            "scale": 1.5,
            "router_bias": True,
            "router_scale": 0.5,
            "expert_scales": True,
            "d_ff": 48,
        },
    },
    "shared experts": {
        "activation": "swiglu_clamped",
        "norm": "rmsnorm",
        "parallel_residual": True,
        "experts": {"count": 4, "per_token": 3, "shared": 2, "shared_gate": True, "d_ff": 32, "layers": [1]},
    },
    "norms of experts": {
        "norm_position": "sandwich",
        "norm": "rmsnorm",
        "activation": "geglu_tanh",
        "bias": False,
        "experts": {"count": 4, "per_token": 3, "own_norms": True, "shared": 1},
    },
    "norms of experts alone": {"parallel_residual": True, "experts": {"count": 4, "own_norms": True}},
}
CACHES: dict[CacheDtype, float] = {"auto": 2e-4, "int8": 2e-2, "fp8": 2e-2}
TEXTS = [list(range(3, 21)), list(range(40, 49)), list(range(7, 20))]


def read_apart(model: Transformer, *, cache_dtype: CacheDtype = "auto") -> list[Tensor]:
    """The hidden states of all texts, read token by token, several of a text in the first passes."""
    reaches = reaches_of(model)
    cache = PagedCache(model, [32] * len(reaches), 4, cache_dtype=cache_dtype, batch_invariant=True)
    manager = BlockManager([32] * len(reaches), reaches, 4)
    tables = [manager.open([]) for _ in TEXTS]
    found: list[list[Tensor]] = [[] for _ in TEXTS]
    with torch.inference_mode():
        while ready := [n for n, text in enumerate(TEXTS) if tables[n].num_tokens < len(text)]:
            counts = [min(5 if tables[n].num_tokens == 0 else 1, len(TEXTS[n]) - tables[n].num_tokens) for n in ready]
            chunks = [Chunk(tables[n], tables[n].num_tokens, count) for n, count in zip(ready, counts, strict=True)]
            for n, count in zip(ready, counts, strict=True):
                manager.reserve(tables[n], count)
            cache.read(chunks)
            tokens = [t for n, chunk in zip(ready, chunks, strict=True) for t in TEXTS[n][chunk.start : chunk.end]]
            hidden = model.hidden_states(torch.tensor(tokens)[:, None], cache=cache)[:, 0]
            for n, chunk, states in zip(ready, chunks, hidden.split(counts), strict=True):
                found[n].append(states)
                manager.advance(tables[n], TEXTS[n], chunk.end)
    return [torch.cat(states) for states in found]


def whole(model: Transformer) -> list[Tensor]:
    with torch.inference_mode():
        return [model.hidden_states(torch.tensor([text]))[0] for text in TEXTS]


def assert_near(found: list[Tensor], expected: list[Tensor], error: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= error * other.abs().max()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_block_in_one_call_is_the_block(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = toy_model(**NETWORKS[name])
    rounded = quantize(model, "int8")
    exact = whole(toy_model(**NETWORKS[name]).double())
    native = with_native_blocks(with_native_products(model, always=True).eval())
    in_int8 = with_native_blocks(with_native_products(rounded, always=True).eval())
    plain = with_native_products(rounded, always=True).eval()
    expected = {kind: read_apart(plain, cache_dtype=kind) for kind in CACHES}
    monkeypatch.setattr(Block, "forward", None)  # no pass needs it
    assert all(type(block) is NativeBlock for block in (*native.layers, *in_int8.layers))
    assert_near(read_apart(native), exact, 2e-5)
    for kind, error in CACHES.items():
        assert_near(read_apart(in_int8, cache_dtype=kind), expected[kind], error)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["parallel branches", "alibi, window", "norm behind the sum", "experts"])
def test_all_blocks_in_one_call_are_the_blocks_one_by_one(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, name: str, num_layers: int
) -> None:
    model = toy_model(**NETWORKS[name], num_layers=num_layers)
    native = with_native_blocks(with_native_products(model, always=True).eval())
    with monkeypatch.context() as patched:
        patched.setattr(NativeBlock, "forward", None)  # no pass needs it
        together = read_apart(native)
    native.run_together = None
    assert_near(read_apart(native), together, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_block_of_16_bits_is_the_exact_network_of_these_numbers(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """In float32; with keys and values in 16 bits it differs by their rounding."""
    model = toy_model(**NETWORKS[name]).to(dtype)
    exact = whole(toy_model(**NETWORKS[name]).to(dtype).double())
    native = with_native_blocks(with_native_products(model, always=True).eval())
    assert (native.dtype, native.cache_dtype) == (torch.float32, dtype)
    monkeypatch.setattr(Block, "forward", None)  # no pass needs it
    assert_near(read_apart(native), exact, 4 * torch.finfo(dtype).eps)
    native.cache_dtype = None
    assert_near(read_apart(native), exact, 2e-5)


def test_what_the_kernel_does_not_know_runs_as_it_is(toy_model: Callable[..., Transformer]) -> None:
    for settings in ({"attention_output_gate": True}, {"short_convolution": 3}, {"d_ff": 72}):
        model = with_native_blocks(with_native_products(toy_model(**settings), always=True))
        assert {type(block) for block in model.layers} == {Block}


def test_a_watched_block_shows_its_numbers(toy_model: Callable[..., Transformer]) -> None:
    model = toy_model()
    native = with_native_blocks(with_native_products(model, always=True).eval())
    with record(native, ["blocks.*.middle"]) as seen:
        found = read_apart(native)
    assert len(seen) == len(model.layers)
    assert_near(found, whole(model), 2e-5)


def test_a_number_that_is_not_finite_spoils_its_text_alone(toy_model: Callable[..., Transformer]) -> None:
    for kind in CACHES:
        model = toy_model()
        with torch.no_grad():
            model.embedding.weight[TEXTS[1][4]] = torch.nan
        found = read_apart(with_native_blocks(with_native_products(model, always=True).eval()), cache_dtype=kind)
        assert found[0].isfinite().all() and found[2].isfinite().all()
        assert found[1][:4].isfinite().all() and found[1][4:].isnan().all()


def test_a_copy_is_a_network_of_plain_blocks_over_the_same_weights(toy_model: Callable[..., Transformer]) -> None:
    """In batch-invariant mode, for a network that already uses the kernels."""
    native = with_native_blocks(with_native_products(toy_model(), always=True).eval())
    again = native.sharing_copy()
    assert {type(block) for block in again.layers} == {Block}
    assert [id(weight) for weight in again.parameters()] == [id(weight) for weight in native.parameters()]
    found = read_apart(with_native_blocks(with_native_products(again, always=True).eval()))
    assert_near(found, read_apart(native), 0.0)


def test_sizes_that_do_not_fit_are_refused(toy_model: Callable[..., Transformer]) -> None:
    """Those of the layers when the block is made, those of a pass before the native code reads them."""
    model = with_native_products(toy_model(num_kv_heads=2, position_encoding="rope"), always=True).eval()
    attention = model.layers[0].attention
    assert attention is not None
    kept, attention.v_proj = attention.v_proj, attention.q_proj
    with pytest.raises(ValueError, match="the projection v maps"):
        with_native_blocks(model)
    attention.v_proj = kept
    native = with_native_blocks(model)
    cache, manager = PagedCache(native, [8], 4, batch_invariant=True), BlockManager([8], [None], 4)
    table = manager.open([])
    manager.reserve(table, 3)
    cache.read([Chunk(table, 0, 3)])
    whole = cache.keys[0].numbers
    for damaged in (whole[..., :-2], whole[:, :1], whole.transpose(1, 2)):
        cache.keys[0].numbers = damaged
        with torch.inference_mode(), pytest.raises(ValueError, match="the cache must be contiguous"):
            native.hidden_states(torch.tensor([[3], [4], [5]]), cache=cache)
