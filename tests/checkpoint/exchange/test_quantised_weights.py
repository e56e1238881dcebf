"""Checkpoints with quantised weights: every number is what a slow loop over the published format gives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.checkpoint.exchange.reader import language_model, read_hugging_face
from sheepop.checkpoint.foreign import read_foreign
from sheepop.core.errors import CheckpointError
from sheepop.jobs.exchange import import_model

from .conftest import CONFIG

KEYS = {"hidden_size": 16, "intermediate_size": 32, "torch_dtype": "bfloat16"}
SHAPES = {
    **{f"self_attn.{name}_proj": (16, 16) for name in "qkvo"},
    **{f"mlp.{name}_proj": (32, 16) for name in ("gate", "up")},
    "mlp.down_proj": (16, 32),
}
OURS = {"self_attn": "attention", "mlp": "feed_forward"}

# The parts of a weight by the ends of their names, and its numbers as rows.
Made = tuple[dict[str, Tensor], list[list[float]]]
Draw = np.random.Generator


def words(numbers: np.ndarray, bits: int) -> Tensor:
    """Packs unsigned numbers along the last dimension, the first one in the lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // per_word)), dtype=np.uint32)
    for index in np.ndindex(numbers.shape):
        *rest, place = index
        packed[(*rest, place // per_word)] |= np.uint32(int(numbers[index]) << (bits * (place % per_word)))
    return torch.from_numpy(packed.view(np.int32))


def scaled(scales: str, block: tuple[int, int] | None, dtype: torch.dtype, *, form: str = "block") -> Callable:
    """8-bit numbers with a scale for each block, row (`form` "row") or matrix ("one")."""

    def made(rows: int, columns: int, draw: Draw) -> Made:
        codes = torch.from_numpy(draw.integers(-100, 100, (rows, columns)).astype(np.float32)).to(dtype)
        height, width = {"block": block or (0, 0), "row": (1, columns), "one": (rows, columns)}[form]
        factors = draw.uniform(0.001, 0.01, (-(-rows // height), -(-columns // width))).astype(np.float32)
        found = [
            [float(codes[i, j]) * float(factors[i // height, j // width]) for j in range(columns)] for i in range(rows)
        ]
        stored = torch.from_numpy(factors)
        return {".weight": codes, scales: stored.reshape(()) if form == "one" else stored}, found

    return made


def gptq(bits: int, group: int, *, less: int, shuffled: bool) -> Callable:
    """Codes (C, R) packed along the inputs, zeros (G, R) along the outputs and less by `less`."""

    def made(rows: int, columns: int, draw: Draw) -> Made:
        count, size = (1, columns) if group == -1 else (-(-columns // group), group)
        groups = np.arange(columns) // size
        if shuffled:
            groups = draw.permutation(groups)
        codes = draw.integers(0, 2**bits, (columns, rows))
        zeros = draw.integers(0, 2**bits, (count, rows))
        factors = draw.uniform(0.001, 0.01, (count, rows)).astype(np.float16)
        found = [
            [float(factors[groups[j], i]) * float(codes[j, i] - zeros[groups[j], i]) for j in range(columns)]
            for i in range(rows)
        ]
        stored = np.where(zeros < less, 2**bits - 1, zeros - less)
        parts = {
            ".qweight": words(codes.T, bits).t().contiguous(),
            ".qzeros": words(stored, bits),
            ".scales": torch.from_numpy(factors),
        }
        return parts | ({".g_idx": torch.from_numpy(groups.astype(np.int32))} if shuffled else {}), found

    return made


def awq(rows: int, columns: int, draw: Draw) -> Made:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers: np.ndarray) -> Tensor:
        moved = np.zeros_like(numbers)
        for start in range(0, numbers.shape[1], 8):
            for place, output in enumerate(order):
                moved[:, start + place] = numbers[:, start + output]
        return words(moved, 4)

    codes, zeros = draw.integers(0, 16, (columns, rows)), draw.integers(0, 16, (columns // 8, rows))
    factors = draw.uniform(0.001, 0.01, (columns // 8, rows)).astype(np.float16)
    found = [
        [float(factors[j // 8, i]) * float(codes[j, i] - zeros[j // 8, i]) for j in range(columns)] for i in range(rows)
    ]
    return {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": torch.from_numpy(factors)}, found


def packed(bits: int, group: int | None, *, symmetric: bool) -> Callable:
    """Signed codes plus half of their range, as compressed-tensors packs them."""

    def made(rows: int, columns: int, draw: Draw) -> Made:
        half, size = 2 ** (bits - 1), group or columns
        codes = draw.integers(-half, half, (rows, columns))
        zeros = (
            np.zeros((rows, -(-columns // size)), dtype=int)
            if symmetric
            else draw.integers(-half, half, (rows, -(-columns // size)))
        )
        factors = draw.uniform(0.001, 0.01, zeros.shape).astype(np.float16)
        found = [
            [float(factors[i, j // size]) * float(codes[i, j] - zeros[i, j // size]) for j in range(columns)]
            for i in range(rows)
        ]
        parts = {
            ".weight_packed": words(codes + half, bits),
            ".weight_scale": torch.from_numpy(factors),
            ".weight_shape": torch.tensor([rows, columns]),
        }
        return parts | (
            {} if symmetric else {".weight_zero_point": words((zeros + half).T, bits).t().contiguous()}
        ), found

    return made


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def four_bits(kind: str, *, nested: bool) -> Callable:
    def made(rows: int, columns: int, draw: Draw) -> Made:
        count, size, outer_size = rows * columns, 64, 4
        table = np.array(NF4, dtype=np.float32)
        data = draw.integers(0, 256, count // 2).astype(np.uint8)
        scales = draw.uniform(0.5, 1.5, -(-count // size)).astype(np.float32)
        parts = {".weight": torch.from_numpy(data)[:, None], ".weight.quant_map": torch.from_numpy(table)}
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [rows, columns]}
        if nested:
            inner = draw.integers(0, 256, len(scales)).astype(np.uint8)
            inner_table = np.linspace(-1, 1, 256, dtype=np.float32)
            outer = draw.uniform(0.1, 0.2, -(-len(scales) // outer_size)).astype(np.float32)
            state |= {"nested_blocksize": outer_size, "nested_dtype": "float32", "nested_offset": 0.8125}
            # Each step rounds to float32, as the library's does.
            products = [np.float32(inner_table[code] * outer[place // outer_size]) for place, code in enumerate(inner)]
            scales = np.array([np.float32(product + np.float32(0.8125)) for product in products])
            parts |= {".weight.absmax": torch.from_numpy(inner)}
            parts |= {".weight.nested_absmax": torch.from_numpy(outer)}
            parts |= {".weight.nested_quant_map": torch.from_numpy(inner_table)}
        else:
            parts |= {".weight.absmax": torch.from_numpy(scales)}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts |= {f".weight.quant_state.bitsandbytes__{kind}": text}
        flat = []
        for place in range(count):
            byte = int(data[place // 2])
            flat.append(float(table[byte >> 4 if place % 2 == 0 else byte & 15]) * float(scales[place // size]))
        return parts, [flat[row * columns : (row + 1) * columns] for row in range(rows)]

    return made


def eight_bits(rows: int, columns: int, draw: Draw) -> Made:
    codes, scales = draw.integers(-127, 128, (rows, columns)), draw.uniform(0.5, 2.0, rows).astype(np.float32)
    # One over 127 in float32; the product rounds twice.
    found = [
        [float(np.float32(np.float32(int(code)) * scales[i]) * np.float32(1 / 127)) for code in codes[i]]
        for i in range(rows)
    ]
    parts = {".weight": torch.from_numpy(codes.astype(np.int8)), ".SCB": torch.from_numpy(scales)}
    return parts | {".weight_format": torch.tensor(0, dtype=torch.uint8)}, found


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [5, 7]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
E4M3 = torch.float8_e4m3fn
GROUPS_OF_8 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}

CASES: dict[str, tuple[dict[str, Any], Callable]] = {
    "fp8 in blocks": (FP8, scaled(".weight_scale_inv", (5, 7), E4M3)),
    "fp8 with one scale": (FP8 | {"weight_block_size": None}, scaled(".weight_scale_inv", None, E4M3, form="one")),
    "fp8 of FBGEMM": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        scaled(".weight_scale", None, E4M3, form="row"),
    ),
    "a scale for each row": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        scaled(".weight_scale", None, E4M3, form="row"),
    ),
    "a scale for each matrix": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        scaled(".weight_scale", None, E4M3, form="one"),
    ),
    "int8 with rows": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        scaled(".weight_scale", None, torch.int8, form="row"),
    ),
    "packed": (compressed("pack-quantized", **GROUPS_OF_8), packed(4, 8, symmetric=True)),
    "packed with zeros": (
        compressed("pack-quantized", **GROUPS_OF_8, symmetric=False), packed(4, 8, symmetric=False)
    ),
    "packed in rows": (
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), packed(8, None, symmetric=True)
    ),
    "gptq": (GPTQ, gptq(4, 8, less=1, shuffled=False)),
    "gptq in the order of importance": (GPTQ | {"desc_act": True}, gptq(4, 8, less=1, shuffled=True)),
    "gptq of the second version": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 8, less=0, shuffled=True)),
    "gptq with 8 bits and one group": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, -1, less=1, shuffled=False)),
    "gptq with 2 bits": (GPTQ | {"bits": 2, "group_size": 16}, gptq(2, 16, less=1, shuffled=False)),
    "awq": (AWQ, awq),
    "nf4": (FOUR, four_bits("nf4", nested=False)),
    "fp4 with scales of scales": (FOUR, four_bits("fp4", nested=True)),
    "int8 of bitsandbytes": (EIGHT, eight_bits),
}  # fmt: skip


def tensors_of(made: Callable, *, ordinary: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file, and the expected weights in float64 by our names; `ordinary` layers are not quantised."""
    draw = np.random.default_rng(0)
    tensors, expected = {}, {}
    for layer in range(2):
        for place, (rows, columns) in SHAPES.items():
            name = f"model.layers.{layer}.{place}"
            sublayer, projection = place.split(".")
            ours = f"blocks.{layer}.{OURS[sublayer]}.{projection}.weight"
            if place in ordinary:
                tensors[f"{name}.weight"] = torch.from_numpy(draw.normal(size=(rows, columns))).bfloat16()
                expected[ours] = tensors[f"{name}.weight"].double()
                continue
            parts, numbers = made(rows, columns, draw)
            tensors |= {name + end: part.contiguous() for end, part in parts.items()}
            expected[ours] = torch.tensor(numbers, dtype=torch.float64)
        for norm in ("input", "post_attention"):
            tensors[f"model.layers.{layer}.{norm}_layernorm.weight"] = torch.ones(16, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.from_numpy(draw.normal(size=(130, 16))).bfloat16()
    return tensors, expected


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_a_slow_loop(make, case: str) -> None:
    config, made = CASES[case]
    tensors, expected = tensors_of(made)
    directory = make({**KEYS, "quantization_config": config}, tensors)
    for dtype, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = read_foreign(directory, dtype=dtype)
        for name, numbers in expected.items():
            found = model.tensors[name]
            assert (found.dtype, found.shape) == (wanted, tuple(numbers.shape))
            assert torch.equal(found.read(), numbers.float().to(wanted)), name
        assert any(f"14 weights, which are stored with {config['quant_method']}, are" in note for note in model.notes)
        assert not any("Ignored keys" in note for note in model.notes)


def test_blocks_of_128_at_the_edge_of_a_matrix() -> None:
    from sheepop.checkpoint.exchange.quantised_weights import dequantised, take_quantisation
    from sheepop.checkpoint.lazy_tensor import LazyTensor

    parts, numbers = scaled(".weight_scale_inv", (128, 128), E4M3)(200, 130, np.random.default_rng(1))
    tensors = {f"layer{end}": LazyTensor.of(part) for end, part in parts.items()}
    keys = {"quantization_config": FP8 | {"weight_block_size": [128, 128]}}
    _, quantisation = take_quantisation(keys, "config.json")
    found, _ = dequantised(tensors, quantisation, torch.float32, Path("place"))
    assert parts[".weight_scale_inv"].shape == (2, 2)
    assert torch.equal(found["layer.weight"].read(), torch.tensor(numbers, dtype=torch.float64).float())


def test_layers_that_are_not_quantised_are_taken_as_they_are(make, tmp_path: Path) -> None:
    ordinary = ("mlp.down_proj", "self_attn.q_proj")
    tensors, expected = tensors_of(scaled(".weight_scale_inv", (5, 7), E4M3), ordinary=ordinary)
    tensors["model.layers.0.self_attn.k_proj.activation_scale"] = torch.ones(())
    config = FP8 | {"modules_to_not_convert": ["down_proj", "self_attn.q_proj", "lm_head"], "news": 1}
    directory = make({**KEYS, "quantization_config": config}, tensors)
    result = import_model(directory, tmp_path / "ours")
    assert result["dtypes"] == ["bfloat16"]
    notes = "\n".join(result["notes"])
    assert "10 weights, which are stored with fp8, are converted to bfloat16." in notes
    assert "SheepOp does not round activations: model.layers.0.self_attn.k_proj.activation_scale." in notes
    assert "Ignored keys of quantization_config: news." in notes
    model = read_hugging_face(directory)
    assert all(torch.equal(model.tensors[name].read(), numbers.bfloat16()) for name, numbers in expected.items())


def test_without_a_dtype_in_the_configuration_that_of_the_embedding_is_taken(make) -> None:
    tensors, _ = tensors_of(awq)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    model = read_hugging_face(make({**KEYS, "torch_dtype": ..., "quantization_config": AWQ}, tensors))
    assert model.tensors["blocks.0.attention.q_proj.weight"].dtype == torch.float16


def test_a_number_that_float16_does_not_hold_is_refused(make, tmp_path: Path) -> None:
    tensors, _ = tensors_of(scaled(".weight_scale_inv", (5, 7), E4M3))
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] *= 1e6
    directory = make({**KEYS, "quantization_config": FP8}, tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has numbers up to .*float16"):
        import_model(directory, tmp_path / "ours", dtype="float16")


def test_biases_of_zero_that_gptq_adds_are_left_out_and_others_refused(make) -> None:
    tensors, _ = tensors_of(gptq(4, 8, less=1, shuffled=False))
    bias = "model.layers.0.mlp.up_proj.bias"
    directory = make({**KEYS, "quantization_config": GPTQ}, tensors | {bias: torch.zeros(32).half()})
    assert f"Left out biases that are zero: {bias}." in read_hugging_face(directory).notes
    other = make({**KEYS, "quantization_config": GPTQ}, tensors | {bias: torch.ones(32).half()}, "other")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias is unexpected"):
        read_hugging_face(other)


PLACE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("fp8 in blocks", {".weight_scale_inv": None}, r"up_proj\.weight_scale_inv is missing"),
        ("fp8 in blocks", {".weight_scale_inv": torch.ones(7, 4)}, r"shape \(7, 4\), expected \(7, 3\) for blocks of"),
        ("fp8 in blocks", {".weight_scale_inv": torch.ones(7, 3).to(torch.uint8)}, "its scales have the dtype uint8"),
        ("fp8 in blocks", {".weight": torch.ones(32).to(E4M3)}, "not that of a matrix"),
        ("fp8 in blocks", {".weight": torch.ones(32, 16)}, r"up_proj\.weight_scale_inv is unexpected"),
        ("a scale for each row", {".weight_scale": torch.ones(31, 1)}, "one for the matrix or for each of 32 rows"),
        ("gptq", {".qzeros": torch.ones(2, 3).int()}, r"its zeros have the shape \(2, 3\), expected \(2, 4\)"),
        ("gptq", {".scales": torch.ones(3, 32)}, r"its scales have the shape \(3, 32\), expected \(2, 32\)"),
        ("gptq", {".qweight": torch.ones(2, 20).int()}, "expected"),
        ("gptq", {".weight": torch.ones(32, 16)}, r"up_proj\.weight is stored twice"),
        ("gptq", {".g_idx": torch.ones(15).int()}, r"its groups have the shape \(15,\)"),
        ("awq", {".scales": None}, r"up_proj\.scales is missing"),
        ("packed", {".weight_shape": torch.tensor([32, 17])}, r"shape is \(32, 17\), but its codes are 32 rows of 2"),
        ("packed with zeros", {".weight_zero_point": None}, r"weight_zero_point is missing"),
        ("nf4", {".weight.absmax": torch.ones(7)}, r"its absmax have the shape \(7,\), expected \(8,\)"),
        ("nf4", {".weight.quant_state.bitsandbytes__nf4": None}, "not exactly one quant_state"),
        (
            "nf4", {".weight.quant_state.bitsandbytes__nf4": torch.tensor([123, 255], dtype=torch.uint8)},
            "not a JSON object",
        ),
        ("nf4", {".weight": torch.zeros(7, 1, dtype=torch.uint8)}, r"7 bytes, which is not half of the shape \(32, 16"),
        ("int8 of bitsandbytes", {".SCB": torch.ones(16)}, r"its scales have the shape \(16,\)"),
        ("int8 of bitsandbytes", {".weight_format": torch.tensor(1)}, "not that of plain rows"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_by_name(make, case: str, changes: dict, reason: str) -> None:
    config, made = CASES[case]
    tensors, _ = tensors_of(made)
    for end, part in changes.items():
        tensors.pop(PLACE + end, None)
        if part is not None:
            tensors[PLACE + end] = part
    directory = make({**KEYS, "quantization_config": config}, tensors)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_hugging_face(directory)
    assert PLACE in str(caught.value)


def test_a_group_without_a_scale_is_refused_when_it_is_read(make, tmp_path: Path) -> None:
    tensors, _ = tensors_of(gptq(4, 8, less=1, shuffled=True))
    for number, index in enumerate((2, -1)):
        tensors[f"{PLACE}.g_idx"][3] = index
        directory = make({**KEYS, "quantization_config": GPTQ}, tensors, f"hf{number}")
        with pytest.raises(CheckpointError, match=r"up_proj\.qweight cannot be read: its groups are .*, but it has 2"):
            import_model(directory, tmp_path / "ours")
        assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is a format of quantised weights that SheepOp does not read"),
        ({"bits": 4}, "quant_method = None"),
        ([1], r"quantization_config = \[1\] is not a table"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (GPTQ | {"bits": 3}, "bits = 3 is not 2 or 4 or 8"),
        ({"quant_method": "gptq"}, "bits is missing"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (EIGHT | {"load_in_8bit": False}, "load_in_8bit"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"), "nvfp4-pack-quantized"),
        (compressed("float-quantized", num_bits=4, type="float", strategy="channel"), "num_bits = 4"),
        (CASES["packed"][0] | {"transform_config": {"config_groups": {"R1": 1}}}, "transform_config"),
        (CASES["packed"][0] | {"config_groups": {}}, "config_groups"),
    ],
)
def test_a_method_that_is_not_read_is_refused_before_weights_are_looked_for(config: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        language_model({**CONFIG, **KEYS, "quantization_config": config}, Path("place"))


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them(make) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    keys = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64,
        "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "num_local_experts": 3, "vocab_size": 130, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "max_position_embeddings": 131072, "eos_token_id": None, "pad_token_id": None,
        "layer_types": ["full_attention"],
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**keys)).bfloat16()
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    expected = {}
    for name, outputs, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        place = f"model.layers.0.mlp.experts.{name}"
        blocks = torch.randint(0, 256, (3, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(100, 135, (3, outputs, inputs // 32), dtype=torch.uint8)
        del tensors[place]
        tensors |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    unset = {"intermediate_size": 32, "eos_token_id": ..., "pad_token_id": ...}
    directory = make({**keys, **unset, "quantization_config": config}, tensors)
    model = read_hugging_face(directory)
    assert not any("Ignored keys of quantization_config" in note for note in model.notes)
    found = {name: tensor.read() for name, tensor in model.tensors.items() if ".experts." in name}
    gate_up, down = expected["gate_up_proj"], expected["down_proj"]
    assert {found[name].dtype for name in found if name.endswith("_proj")} == {torch.bfloat16}
    assert torch.equal(found["blocks.0.feed_forward.experts.gate_proj"], gate_up[..., ::2].transpose(1, 2))
    assert torch.equal(found["blocks.0.feed_forward.experts.up_proj"], gate_up[..., 1::2].transpose(1, 2))
    assert torch.equal(found["blocks.0.feed_forward.experts.down_proj"], down.transpose(1, 2))
    assert math.isfinite(float(gate_up.float().sum()))
    for spoiled, reason in ((torch.zeros(3, 64, 3, dtype=torch.uint8), "its scales have the shape"), (None, "missing")):
        name = "model.layers.0.mlp.experts.gate_up_proj_scales"
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        changed |= {} if spoiled is None else {name: spoiled}
        directory = make({**keys, **unset, "quantization_config": config}, changed, f"hf {reason}")
        with pytest.raises(CheckpointError, match=reason):
            read_hugging_face(directory)
