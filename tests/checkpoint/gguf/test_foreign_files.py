"""Small files as other programs write them: keys and tensors are read, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.gguf.container import CHECKSUM_KEY, TensorEntry, checksum_placeholder, write_container
from sheepop.checkpoint.gguf.description import CONFIG_KEY, config_metadata
from sheepop.checkpoint.gguf.hybrid import ARCHITECTURES
from sheepop.checkpoint.gguf.layout import places
from sheepop.checkpoint.gguf.metadata import Value, ValueType, i32s, value_of
from sheepop.checkpoint.gguf.quantized_types import F32
from sheepop.checkpoint.gguf.reader import open_gguf
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig

KEYS = {
    "llama.block_count": value_of(1), "llama.context_length": value_of(8), "llama.embedding_length": value_of(8),
    "llama.feed_forward_length": value_of(8), "llama.attention.head_count": value_of(2),
    "llama.attention.layer_norm_rms_epsilon": value_of(1e-5),
}  # fmt: skip
SHAPES = {
    "token_embd.weight": (6, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (8, 8), "blk.0.ffn_up.weight": (8, 8),
    "blk.0.ffn_down.weight": (8, 8),
    **{f"blk.0.attn_{name}.weight": (8, 8) for name in ("q", "k", "v", "output")},
}  # fmt: skip


def write_foreign(path: Path, keys: dict[str, Value | None], shapes: dict[str, tuple[int, ...] | None]) -> Path:
    """A small file of a llama with some keys and tensors changed, or left out."""
    found = {"general.architecture": value_of("llama"), **KEYS, **keys}
    metadata = {key: value for key, value in found.items() if value is not None}
    entries = [TensorEntry(name, F32, shape) for name, shape in {**SHAPES, **shapes}.items() if shape is not None]
    write_container(
        path,
        {**metadata, CHECKSUM_KEY: checksum_placeholder(0)},
        entries,
        lambda entry: [torch.ones(math.prod(entry.shape)).view(torch.uint8)],
    )
    return path


def test_a_file_with_the_least_keys_is_read(tmp_path: Path) -> None:
    with open_gguf(write_foreign(tmp_path / "toy.gguf", {}, {})) as file:
        assert file.config == ModelConfig(
            vocab_size=6, d_model=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=8, max_seq_len=8,
            position_encoding="rope", norm="rmsnorm", activation="swiglu", bias=False, dropout=0.0, tie_weights=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"llama.rope.freq_base": value_of(1e6)}, {"position_base": 1e6}),
        ({"llama.attention.head_count_kv": i32s([1])}, {"num_kv_heads": 1}),
        ({"llama.rope.scaling.factor": value_of(4.0)}, {"rotary_scaling": {"kind": "linear", "factor": 4.0}}),
        ({"llama.rope.scale_linear": value_of(4.0)}, {"rotary_scaling": {"kind": "linear", "factor": 4.0}}),
        ({"llama.rope.scaling.type": value_of("none"), "llama.rope.scaling.factor": value_of(4.0)}, {}),
        ({
            "llama.rope.scaling.type": value_of("yarn"), "llama.rope.scaling.factor": value_of(4.0),
            "llama.rope.scaling.original_context_length": value_of(2),
        }, {"rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 2}}),
        ({"llama.rope.scaling.finetuned": Value(ValueType.BOOL, True)}, {}),
        ({"llama.attention.sliding_window": value_of(0)}, {}),
        ({"llama.attention.sliding_window": value_of(5)}, {"sliding_window": 5}),
        ({"llama.block_count": Value(ValueType.U64, 1)}, {}),
        ({"llama.vocab_size": value_of(6), "llama.attention.causal": Value(ValueType.BOOL, True)}, {}),
    ],
)  # fmt: skip
def test_keys_are_read(tmp_path: Path, keys: dict[str, Value | None], settings: dict[str, Any]) -> None:
    shapes = {f"blk.0.attn_{name}.weight": (4, 8) for name in "kv"} if "num_kv_heads" in settings else {}
    with open_gguf(write_foreign(tmp_path / "plain.gguf", {}, {})) as file:
        plain = file.config
    with open_gguf(write_foreign(tmp_path / "toy.gguf", keys, shapes)) as file:
        assert file.config == plain.replace(**settings)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": None}, "general.architecture = None is not an architecture that SheepOp reads"),
        ({"general.architecture": value_of("mamba")}, "'mamba' is not an architecture that SheepOp reads. It reads"),
        ({"general.architecture": value_of("gemma3n")}, r"SheepOp reads, because it mixes several residual streams"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": value_of(0)}, "num_layers"),
        ({"llama.block_count": value_of("1")}, "llama.block_count = '1' is not a whole number"),
        ({"llama.block_count": value_of(2**31)}, "not an integer of a reasonable size"),
        ({"llama.block_count": value_of(2**30)}, "is more than the 512 layers that llama.cpp allows"),
        ({"llama.attention.head_count": value_of(0)}, "is not a number of heads"),
        ({"llama.attention.head_count_kv": i32s([1, 2])}, "differs from layer to layer"),
        ({"llama.attention.head_count_kv": value_of(3)}, "does not divide num_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": value_of(math.nan)}, "is not a finite number"),
        ({"llama.attention.layer_norm_rms_epsilon": value_of(0.0)}, "norm_eps"),
        ({"llama.rope.dimension_count": value_of(2)}, "does not fit heads of 4 columns"),
        ({"llama.rope.scaling.type": value_of("longrope")}, "is a scaling that SheepOp does not support"),
        ({"llama.rope.scaling.type": value_of("yarn"), "llama.rope.scaling.factor": value_of(2.0)}, "scaling needs"),
        ({"llama.rope.scaling.attn_factor": value_of(2.0)}, "belongs to a scaling that SheepOp does not support"),
        ({"llama.rope.scaling.type": value_of("yarn"), "llama.rope.scaling.yarn_beta_fast": value_of(8.0)}, "not 32"),
        ({
            "llama.rope.scaling.type": value_of("yarn"), "llama.rope.scaling.factor": value_of(8.0),
            "llama.rope.scaling.original_context_length": value_of(16),
            "llama.rope.scaling.yarn_attn_factor": value_of(1.3),
        }, "yarn_attn_factor = 1.3 is not 1.20794, the value that llama.cpp always uses"),
        ({"llama.vocab_size": value_of(7)}, "contradicts the 6 rows of the embedding"),
        ({"llama.attention.causal": Value(ValueType.BOOL, False)}, "the model is not a language model"),
        ({"llama.logit_scale": value_of(0.5)}, "does not know the key llama.logit_scale of llama, which might change"),
        ({"llama.expert_count": value_of(4), "llama.expert_used_count": value_of(2)}, "gate_exps.weight is missing"),
        ({"llama.expert_count": value_of(4), "llama.expert_used_count": value_of(9)}, "exceeds experts.count"),
        ({"split.count": value_of(3)}, "is one of 3 parts of a model"),
    ],
)  # fmt: skip
def test_keys_that_are_not_honoured_are_named(tmp_path: Path, keys: dict[str, Value | None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {}))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"token_embd.weight": None}, "has no embedding"),
        ({"token_embd.weight": (6,)}, "has no embedding"),
        ({"blk.0.attn_q.weight": None}, "blk.0.attn_q.weight is missing"),
        ({"blk.0.attn_q.weight": (8, 4)}, r"blk.0.attn_q.weight has shape \(8, 4\), expected \(8, 8\)"),
        ({"blk.1.attn_q.weight": (8, 8)}, "blk.1.attn_q.weight is unexpected"),
        ({"rope_factors_long.weight": (2,)}, "rope_factors_long.weight belongs to LongRoPE"),
        ({"rope_freqs.weight": (3,)}, "has 3 numbers for 4 rotated columns"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, shapes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write_foreign(tmp_path / "toy.gguf", {}, shapes))


def test_the_attention_factor_of_published_yarn_files_is_the_usual_one(tmp_path: Path) -> None:
    """Converted OLMo 3 models name it in full: 0.1 ln(8) + 1."""
    keys = {
        "llama.rope.scaling.type": value_of("yarn"), "llama.rope.scaling.factor": value_of(8.0),
        "llama.rope.scaling.original_context_length": value_of(8),
        "llama.rope.scaling.yarn_attn_factor": value_of(1.2079441541679836),
        "llama.rope.scaling.yarn_beta_fast": value_of(32.0), "llama.rope.scaling.yarn_beta_slow": value_of(1.0),
    }  # fmt: skip
    with open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {})) as file:
        scaling = file.config.rotary_scaling
        assert scaling is not None and scaling.attention_factor == pytest.approx(1.2079441541679836)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, make: Callable[..., Any]) -> None:
    """The sizes count them too, and a table names them with the others."""
    config, architecture = make("qwen35").config, ARCHITECTURES["qwen35"]
    metadata = {key: value for key, value in config_metadata(architecture, config).items() if key != CONFIG_KEY}
    del metadata["qwen35.full_attention_interval"]
    metadata |= {
        "qwen35.block_count": value_of(4), "qwen35.nextn_predict_layers": value_of(1),
        "qwen35.attention.recurrent_layers": value_of([True, True, False, False]),
        CHECKSUM_KEY: checksum_placeholder(0),
    }  # fmt: skip
    shapes = {place.theirs: place.shape for place in places(architecture, config)}
    shapes["blk.3.nextn.eh_proj.weight"] = (4, 4)
    entries = [TensorEntry(name, F32, shape) for name, shape in shapes.items()]
    path = tmp_path / "toy.gguf"
    write_container(path, metadata, entries, lambda entry: [torch.ones(math.prod(entry.shape)).view(torch.uint8)])
    with open_gguf(path) as file:
        assert file.config.num_layers == 3
        assert file.config.gated_delta_net is not None
        assert file.config.gated_delta_net.layers == (0, 1)
        assert file.notes() == ["Left out, because they predict further tokens: blk.3.nextn.eh_proj.weight."]


def write_gemma4(path: Path, toy: Any, keys: dict[str, Value], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A toy as another program writes it, with some keys changed and some tensors added; all numbers are 1."""
    architecture = ARCHITECTURES["gemma4"]
    metadata = {key: value for key, value in config_metadata(architecture, toy.config).items() if key != CONFIG_KEY}
    shapes = {place.theirs: place.shape for place in places(architecture, toy.config)} | tensors
    entries = [TensorEntry(name, F32, shape) for name, shape in shapes.items()]
    metadata |= {**keys, CHECKSUM_KEY: checksum_placeholder(0)}
    write_container(path, metadata, entries, lambda entry: [torch.ones(math.prod(entry.shape)).view(torch.uint8)])
    return path


def test_projections_that_nothing_reads_are_left_out(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Published files of Gemma 4 have keys and values in the layers that use those of others."""
    toy = make("gemma4")
    further = {"blk.4.attn_k.weight": (16, 32), "blk.4.attn_v.weight": (16, 32), "blk.5.attn_k_norm.weight": (16,)}
    with open_gguf(write_gemma4(tmp_path / "toy.gguf", toy, {}, further)) as file:
        # Divisors of 1: all pairs turn.
        scaling = {"kind": "proportional", "factor": 1.0, "fraction": 1.0}
        assert file.config == toy.config.replace(rotary_scaling=scaling)
        assert [note.split(": ")[1] for note in file.notes()] == ["; ".join(further) + "."]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma4", {"attention.head_count_kv": i32s([2, 1, 2, 1, 1, 1])}, "one kind the same number of heads"),
        ("gemma4", {"attention.head_count_kv": i32s([2, 1])}, "has 2 entries for 6 layers"),
        ("gemma4", {"attention.value_length_swa": value_of(16)}, "is not the 8 columns of keys"),
        ("gemma4", {"rope.dimension_count": value_of(8)}, "does not rotate whole heads of 16 columns"),
        ("gemma4", {"attention.sliding_window_pattern": value_of(2)}, "is not a list"),
        ("gemma4", {"attention.shared_kv_layers": value_of(6)}, "leaves no layer with keys and values"),
        ("gemma4-experts", {"expert_feed_forward_length": value_of(48)}, "is not the width of an expert"),
        ("gemma4-experts", {"expert_used_count": value_of(0)}, "is not the width of an expert"),
    ],
)
def test_what_gemma_4_does_not_have_is_named(
    tmp_path: Path, make: Callable[..., Any], name: str, keys: dict[str, Value], message: str
) -> None:
    path = write_gemma4(tmp_path / "toy.gguf", make(name), {f"gemma4.{key}": value for key, value in keys.items()}, {})
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "toy.gguf", {}, {"rope_freqs.weight": (2,)})
    with open_gguf(path) as file:
        assert file.config.rotary_scaling is None


def test_a_configuration_that_the_keys_contradict_is_not_believed(tmp_path: Path) -> None:
    own = ModelConfig(vocab_size=6, d_model=8, num_layers=1, num_heads=2, max_seq_len=99, position_encoding="rope")
    keys = {CONFIG_KEY: value_of(own.model_dump_json())}
    with open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {})) as file:
        assert file.config.max_seq_len == 8
    for content in ("{", "[" * 100_000, "3", '{"d_model": -1}'):
        with open_gguf(write_foreign(tmp_path / "toy.gguf", {CONFIG_KEY: value_of(content)}, {})) as file:
            assert file.config.max_seq_len == 8


def test_a_table_is_not_computed_before_its_size_is_seen(tmp_path: Path) -> None:
    own = ModelConfig(
        vocab_size=6, d_model=8, num_layers=1, num_heads=2, max_seq_len=2**30, position_encoding="sinusoidal",
        activation="gelu_tanh", d_ff=8, dropout=0.0,
    )  # fmt: skip
    keys = {**config_metadata(ARCHITECTURES["gpt2"], own), **dict.fromkeys(KEYS)}
    with pytest.raises(CheckpointError, match=r"position_embd\.weight is missing"):
        open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {}))
