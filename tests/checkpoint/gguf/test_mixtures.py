"""Tensors get the types that llama-quantize chooses, and a quantised file is read by llama.cpp's package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.gguf.block_encoding import ENCODERS
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.quantized_types import TYPES
from sheepop.checkpoint.gguf.reader import open_gguf
from sheepop.checkpoint.gguf.writer import MIXTURES, write_gguf
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig

LAYERS = {"d_model": 256, "num_heads": 8, "num_kv_heads": 2, "d_ff": 512, "position_encoding": "rope"}


def types(name: str, config: ModelConfig, tensors: dict[str, int]) -> dict[str, str]:
    return {tensor: MIXTURES[name].type_of(tensor, columns, config).name for tensor, columns in tensors.items()}


def test_about_half_of_the_layers_get_more_bits() -> None:
    # Of 16 layers: the first eighth (0, 1), the last eighth (14, 15), and every third one from 4 between them.
    config = ModelConfig(**LAYERS, num_layers=16, tie_weights=False)
    for name, usual in (("q4_k_m", "q4_k"), ("q5_k_m", "q5_k")):
        for part, columns in (("attn_v", 256), ("ffn_down", 512), ("attn_qkv", 256)):
            found = [MIXTURES[name].type_of(f"blk.{layer}.{part}.weight", columns, config).name for layer in range(16)]
            assert [layer for layer in range(16) if found[layer] == "q6_k"] == [0, 1, 4, 7, 10, 13, 14, 15]
            assert set(found) == {usual, "q6_k"}
    assert MIXTURES["q4_0"].type_of("blk.0.ffn_down.weight", 512, config).name == "q4_0"


@pytest.mark.parametrize(
    ("name", "tied", "columns", "wanted"),
    [
        ("q4_k_m", False, 256, ("q4_k", "q6_k", "q4_k")),
        ("q4_k_m", True, 256, ("q6_k", "q6_k", "q4_k")),
        ("q4_k_m", True, 96, ("q8_0", "q8_0", "q5_0")),
        ("q5_k_m", False, 96, ("q5_1", "q8_0", "q5_1")),
        ("q6_k", False, 96, ("q8_0", "q8_0", "q8_0")),
        ("q4_0", False, 256, ("q4_0", "q6_k", "q4_0")),
        ("q4_0", True, 96, ("q8_0", "q8_0", "q4_0")),
        ("q8_0", True, 256, ("q8_0", "q8_0", "q8_0")),
        ("f16", True, 96, ("f16", "f16", "f16")),
    ],
)
def test_embedding_and_output(name: str, tied: bool, columns: int, wanted: tuple[str, ...]) -> None:
    config = ModelConfig(**LAYERS, num_layers=16, tie_weights=tied)
    tensors = dict.fromkeys(("token_embd.weight", "output.weight", "blk.2.attn_q.weight"), columns)
    assert tuple(types(name, config, tensors).values()) == wanted


def test_attention_beside_eight_experts_and_in_the_largest_models_gets_more_bits() -> None:
    attention = {f"blk.2.attn_{part}.weight": 256 for part in ("q", "k", "v", "output")}
    eight = ModelConfig(**LAYERS, num_layers=16, experts={"count": 8, "per_token": 2})
    assert list(types("q4_k_m", eight, attention).values()) == ["q4_k", "q8_0", "q8_0", "q5_k"]
    assert types("q4_k_m", eight, {"blk.4.ffn_down_exps.weight": 512, "blk.4.ffn_up_exps.weight": 256}) == {
        "blk.4.ffn_down_exps.weight": "q6_k", "blk.4.ffn_up_exps.weight": "q4_k",
    }  # fmt: skip
    large = ModelConfig(**LAYERS, num_layers=80)
    assert list(types("q4_k_m", large, {name.replace("2", "11"): 256 for name in attention}).values()) == [
        "q4_k", "q4_k", "q5_k", "q4_k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("toy", "name", "changes"),
    [
        ("llama", "q4_k_m", {}),
        ("llama", "q5_0", {}),
        ("llama", "q6_k", {}),
        ("gemma3", "q4_k_m", {"embedding_scale": 16.0}),
        # The embedding is written twice, once with its factor.
        ("llama-biases", "q5_k_m", {"tie_weights": True}),
        ("gpt2", "q4_0", {}),
        ("mixtral", "q5_k_m", {"num_layers": 1}),
    ],
)
def test_a_quantised_file_holds_what_llama_cpps_own_package_reads(
    tmp_path: Path, make: Callable[..., Any], toy: str, name: str, changes: dict[str, Any]
) -> None:
    gguf = pytest.importorskip("gguf")
    made = make(toy, **{"d_model": 256, "d_ff": 288, "num_layers": 2, **changes})
    written = write_gguf(tmp_path / "toy.gguf", made.config, made.tensors, made.tokenizer, dtype=name, name="toy")
    # The rows of the last matrix in the feed-forward network have 288 numbers.
    noted = [note for note in written.notes if "tensors have rows that are not multiples of 256 numbers" in note]
    assert len(noted) == (1 if "k" in name else 0)
    reader = gguf.GGUFReader(tmp_path / "toy.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
    with Container(tmp_path / "toy.gguf") as container:
        for tensor in reader.tensors:
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(container.read(tensor.name).float().numpy(), wanted), tensor.name
    with open_gguf(tmp_path / "toy.gguf") as file:
        assert file.config == made.config
        for ours, tensor in made.tensors.items():
            own, found = tensor.read(), file.tensors[ours].read()
            assert (found - own).norm() <= 0.11 * own.norm(), ours


@given(
    width=st.sampled_from([*range(64, 1025, 64), 72, 96, 100, 160, 264, 288, 352, 544, 1000]),
    toy=st.sampled_from(["gpt2", "sinusoidal", "llama"]),
    name=st.sampled_from([name for name, mixture in MIXTURES.items() if mixture.most.startswith("q")]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_width_is_written_so_that_llama_cpp_reads_it_or_refused(
    tmp_path: Path, make: Callable[..., Any], width: int, toy: str, name: str, seed: int
) -> None:
    gguf = pytest.importorskip("gguf")
    heads = 4 if width % 8 == 0 else 2  # rotary positions need heads of even width
    sizes = {"d_model": width, "num_heads": heads, "d_ff": 2 * width, "num_layers": 1, "max_seq_len": 16}
    made, file = make(toy, seed=seed, **sizes), tmp_path / "toy.gguf"

    def write() -> None:
        write_gguf(file, made.config, made.tensors, made.tokenizer, dtype=name, name="toy", replace=True)

    if width % 32:
        with pytest.raises(CheckpointError, match=f"rows of {width} numbers, but .* needs multiples of 32"):
            write()
        return
    write()
    with Container(file) as container:
        for tensor in gguf.GGUFReader(file).tensors:
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(container.read(tensor.name).float().numpy(), wanted), tensor.name


@given(
    st.sampled_from(sorted(ENCODERS)), st.integers(0, 2**16), st.sampled_from([1e-9, 0.02, 30.0]), st.integers(1, 70)
)
@settings(max_examples=60, deadline=None)
def test_the_bytes_of_a_block_do_not_depend_on_the_blocks_beside_it(name: str, seed: int, size: float, count: int):
    numbers = torch.randn(70, TYPES[name].block, generator=torch.Generator().manual_seed(seed)) * size
    numbers[::9] = 0
    numbers[::7, : TYPES[name].block // 2] = 0
    parts = [ENCODERS[name](part) for part in torch.split(numbers, count)]
    assert torch.equal(torch.cat(parts), ENCODERS[name](numbers))
