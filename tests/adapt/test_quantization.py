"""Rounding a network's weights to integers: how far they move, what stays, and that a disk keeps them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sheepop.adapt.quantization import input_importance, quantizable, quantize, quantized
from sheepop.adapt.stored_weight import Format, StoredWeight
from sheepop.checkpoint import load_model, model_directory, save_model
from sheepop.checkpoint.lazy_tensor import Memory
from sheepop.checkpoint.model_directory import open_model, unique_weights
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import read_json, write_checksums, write_json
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer


def weights(*shape: int) -> Tensor:
    """Numbers with heavy tails, a row of zeros, and one far outlier."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(*shape, generator=generator) * torch.rand(*shape, generator=generator).pow(3)
    made[1], made[2, 5] = 0.0, 40.0
    return made


def test_int8_moves_a_weight_by_half_a_step_at_most() -> None:
    exact = weights(8, 64)
    found = quantized(exact, "int8")
    steps = exact.abs().amax(1, keepdim=True) / 127
    assert ((found.rows() - exact).abs() <= steps * 0.5001).all()
    assert (found.rows()[1] == 0).all()


def test_int4_is_nearer_than_steps_from_the_least_to_the_largest_weight() -> None:
    """Scales and offsets are chosen by their error, so no group is further away than with even steps over its range."""
    exact = weights(8, 96)
    groups = exact.unflatten(1, (-1, 32))
    low = groups.amin(-1, keepdim=True)
    steps = (groups.amax(-1, keepdim=True) - low).clamp(min=1e-30) / 15
    plain = (((groups - low) / steps).round() * steps + low - groups).square().sum(-1)
    found = (quantized(exact, "int4").rows().unflatten(1, (-1, 32)) - groups).square().sum(-1)
    assert (found <= plain * 1.05 + 1e-9).all()  # bfloat16 rounds scales and offsets
    assert found.sum() < 0.9 * plain.sum()


def test_int4_finds_sixteen_even_steps_again() -> None:
    """Weights that lie on such a grid, as those of other programs' files do, are kept."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (5, 4, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(5, 4, 1, generator=generator).add(0.1).bfloat16().float()
    offsets = torch.randn(5, 4, 1, generator=generator).bfloat16().float()
    exact = (codes * scales + offsets).flatten(1)
    assert (quantized(exact, "int4").rows() - exact).abs().max() < 0.01 * scales.max()


def test_important_columns_move_less() -> None:
    exact, importance = weights(64, 32), torch.ones(32)
    importance[::4] = 100.0
    even, weighed = (quantized(exact, "int4", each).rows() - exact for each in (None, importance))
    assert (importance * weighed.square()).sum() < (importance * even.square()).sum()
    assert weighed[:, ::4].square().sum() < 0.7 * even[:, ::4].square().sum()


def test_the_importance_of_a_column_is_the_mean_square_of_its_input() -> None:
    model = build_model(ModelConfig(**SIZES), 0).eval()
    rows = [torch.arange(20), torch.arange(5)]
    found = input_importance(model, rows)
    layers = {layer.weight: layer for layer in model.modules() if isinstance(layer, nn.Linear)}
    assert found.keys() == layers.keys() - {model.lm_head.weight}
    inputs: list[Tensor] = []
    first = model.blocks[0].attention.q_proj
    first.register_forward_pre_hook(lambda layer, given: inputs.append(given[0][0]))
    for row in rows:
        model(row[None])
    expected = torch.cat(inputs).double().square().mean(0)
    assert torch.allclose(found[first.weight].double(), expected, rtol=1e-5)


def test_int4_refuses_rows_that_groups_do_not_fill() -> None:
    with pytest.raises(UsageError, match="multiple of 32"):
        quantized(weights(4, 48), "int4")


SIZES = {"vocab_size": 130, "d_model": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}


def test_fp8_keeps_the_relative_size_of_small_weights() -> None:
    """Three bits of fraction: a weight moves by a 16th of itself at most, or by half the smallest number."""
    exact = weights(8, 64)
    found = quantized(exact, "fp8")
    smallest = exact.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert ((found.rows() - exact).abs() <= torch.maximum(exact.abs() / 16, smallest / 2) * 1.0001).all()


EXPERTS = {"experts": {"count": 3, "per_token": 2, "shared": 1, "d_ff": 32}}


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_rounded_and_nothing_else(tied: bool) -> None:
    model = build_model(ModelConfig(**SIZES, tie_weights=tied), 0)
    smaller = quantize(model, "int8")
    found = {name for name, weight in smaller.named_parameters() if isinstance(weight, StoredWeight)}
    assert found == {name for name, _ in quantizable(model)}
    assert {name for name, _ in smaller.named_parameters()} - found == {
        name for name, weight in model.named_parameters() if weight.ndim == 1
    }
    assert (smaller.lm_head.weight is smaller.embedding.weight) == tied
    assert not any(isinstance(weight, StoredWeight) for weight in model.parameters())


def test_experts_are_rounded_and_their_router_is_not() -> None:
    model = quantize(build_model(ModelConfig.model_validate({**SIZES, **EXPERTS}), 0), "int8")
    kept = {name for name, weight in model.named_parameters() if not isinstance(weight, StoredWeight)}
    assert any("experts.up_proj" in name for name, _ in quantizable(model))
    routers = {f"blocks.{layer}.feed_forward.router.weight" for layer in range(2)}
    assert routers == {name for name in kept if "norm" not in name and "bias" not in name}


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_disk_keeps_the_rounded_model(form: Format, experts: dict[str, Any], tmp_path: Path) -> None:
    model = quantize(build_model(ModelConfig.model_validate({**SIZES, **experts}), 0), form).eval()
    save_model(tmp_path / "model", model, CharTokenizer(), {})
    loaded = load_model(tmp_path / "model")
    input_ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(input_ids), model(input_ids))
    # int4 has offsets, and leaves the vocabulary at int8.
    assert read_json(tmp_path / "model" / "config.json")["format_version"] == (5 if form == "int4" else 2)
    # The matrices take one byte or half of one; the scales are small beside them.
    stored = {name: weight for name, weight in loaded.model.named_parameters() if isinstance(weight, StoredWeight)}
    for name, weight in stored.items():
        # Of two blocks, none is the first or last eighth, and only the third would be the third between.
        is_half = form == "int4" and name not in ("embedding.weight", "lm_head.weight")
        assert weight.parts[0].nbytes == weight.numel() // (1 + is_half), name
    half = load_model(tmp_path / "model", dtype=torch.bfloat16).model
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half(input_ids).float(), model(input_ids), atol=0.05)
    # Another program gets the numbers that the network computes with.
    exported, expected = open_model(tmp_path / "model").tensors, unique_weights(model)
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        assert tuple(weight.shape) == exported[name].shape
        assert torch.equal(exported[name].read(), weight.rows() if isinstance(weight, StoredWeight) else weight)
    found = read_json(tmp_path / "model" / "config.json")
    write_json(tmp_path / "model" / "config.json", {**found, "quantization": {"weights": "int3", "dtype": "float32"}})
    write_checksums(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"quantization|weights"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_a_machine_with_two_nodes_of_memory_loads_the_same_weights(
    form: Format | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build_model(ModelConfig.model_validate({**SIZES, **EXPERTS}), 0)
    save_model(tmp_path / "model", quantize(model, form) if form else model, CharTokenizer(), {})
    loaded = load_model(tmp_path / "model").model
    monkeypatch.setattr(model_directory, "memory_nodes", lambda: 2)
    take, chunks = Memory.take, list[weakref.ref[Any]]()

    def recorded(memory: Memory, count: int) -> np.ndarray:
        found = take(memory, count)
        chunks.append(weakref.ref(found.base))
        return found

    monkeypatch.setattr(Memory, "take", recorded)
    moved = load_model(tmp_path / "model").model
    input_ids = torch.arange(20)[None]
    assert torch.equal(moved(input_ids), loaded(input_ids))
    gc.collect()
    assert chunks and not [chunk for chunk in chunks if chunk() is not None]  # nothing keeps what the file filled
    assert all(
        part.data_ptr() % 64 == 0 for weight in moved.parameters() for part in getattr(weight, "memory", [weight])
    )


def test_a_model_of_floats_is_of_the_first_version(tmp_path: Path) -> None:
    """So that programs from before quantisation still read it."""
    save_model(tmp_path / "model", build_model(ModelConfig(**SIZES), 0), CharTokenizer(), {})
    found = read_json(tmp_path / "model" / "config.json")
    assert found["format_version"] == 1
    assert "quantization" not in found


def test_int4_leaves_what_matters_most_at_int8() -> None:
    """The vocabulary, and of 8 blocks the first, the last, and every third between: values and down projections."""
    model = quantize(build_model(ModelConfig.model_validate({**SIZES, "num_layers": 8}), 0), "int4")
    found = {name for name, weight in model.named_parameters() if getattr(weight, "stored", None) == "int8"}
    blocks = {name for name in found if name.startswith("blocks.")}
    assert found - blocks == {"embedding.weight"}
    names = ("attention.v_proj.weight", "feed_forward.down_proj.weight")
    assert blocks == {f"blocks.{layer}.{name}" for layer in (0, 3, 6, 7) for name in names}
