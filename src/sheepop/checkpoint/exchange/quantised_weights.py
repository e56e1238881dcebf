"""Checkpoints with quantised weights: `quantization_config` tells the format, and reading a weight dequantises it.

bitsandbytes stores 4 bits by a table (Dettmers et al. 2023, "QLoRA", section 3), or 8 bits with a scale for each row
(Dettmers et al. 2022, "LLM.int8()", section 2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sheepop.checkpoint.exchange.quantised_formats import (
    FLOATS,
    Format,
    Parts,
    awq,
    compressed_tensors,
    expect,
    fbgemm_fp8,
    fp8,
    gptq,
    looked_up,
    matrix,
    mxfp4,
    product,
)
from sheepop.checkpoint.given import Given, shown
from sheepop.checkpoint.lazy_tensor import DTYPES, LazyTensor, Shape, converted
from sheepop.checkpoint.weight_files import listed
from sheepop.core.errors import CheckpointError, first_few

_LARGEST_STATE = 2**16


def bitsandbytes(given: Given) -> Format:
    """Returns the format of 4 or of 8 bits."""
    if given.typed("load_in_4bit", bool, False):
        names = {name: f".weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
        states = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
        optional = ("nested_absmax", "nested_quant_map", *states)
        names = {"codes": ".weight", **names, **states}
        return Format(names, (torch.uint8,), _table_shape, _table_values, optional=optional)
    if not given.typed("load_in_8bit", bool, False):
        raise given.problem("load_in_8bit", "and load_in_4bit are both off, so that nothing tells the format")

    def shape(parts: Parts) -> Shape:
        rows, columns = matrix(parts)
        expect(parts, "scales", (rows,))
        if "layout" in parts and (parts["layout"].count != 1 or int(parts["layout"].read())):
            raise ValueError("its weight_format is not that of plain rows, the only one that SheepOp reads")
        return rows, columns

    def values(parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts["codes"]
        scales = parts["scales"].float()[:, None]
        return product(codes, scales, codes.shape[1]).mul_(1 / 127)

    names = {"codes": ".weight", "scales": ".SCB", "layout": ".weight_format"}
    return Format(names, (torch.int8,), shape, values, optional=("layout",))


def _state(parts: Mapping[str, Any]) -> tuple[Shape, int, int, float]:
    """Returns a weight's shape, the numbers of a scale, the scales of an outer scale, and what is added to a scale."""
    found = [parts[kind] for kind in ("nf4", "fp4") if kind in parts]
    if len(found) != 1:
        raise ValueError("it has not exactly one quant_state")
    data = found[0].read() if isinstance(found[0], LazyTensor) else found[0]
    if data.numel() > _LARGEST_STATE or data.dtype != torch.uint8:
        raise ValueError("its quant_state is too large, or not text")
    try:
        state = json.loads(bytes(data.flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError("its quant_state is not a JSON object")
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    sizes = [state.get("blocksize"), state.get("nested_blocksize", 1)]
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in (*shape, *sizes)):
        raise ValueError(f"its quant_state has the shape {shown(shape)} and blocks of {shown(sizes)}")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise ValueError(f"its quant_state has the offset {shown(offset)}")
    return tuple(shape), sizes[0], sizes[1], float(offset)


def _table_shape(parts: Parts) -> Shape:
    shape, size, outer_size, _ = _state(parts)
    count = math.prod(shape)
    if parts["codes"].count != -(-count // 2):
        raise ValueError(f"its codes are {parts['codes'].count} bytes, which is not half of the shape {shape}")
    scales = -(-count // size)
    expect(parts, "quant_map", (16,))
    nested = "nested_absmax" in parts
    expect(parts, "absmax", (scales,), (torch.uint8,) if nested else FLOATS)
    if nested != ("nested_quant_map" in parts):
        raise ValueError("it has only one of nested_absmax and nested_quant_map")
    if nested:
        expect(parts, "nested_absmax", (-(-scales // outer_size),))
        expect(parts, "nested_quant_map", (256,))
    return shape


def _table_values(parts: Mapping[str, Tensor]) -> Tensor:
    shape, size, outer_size, offset = _state(parts)
    scales = parts["absmax"]
    if "nested_absmax" in parts:
        outer = parts["nested_absmax"].float().repeat_interleave(min(outer_size, len(scales)))[: len(scales)]
        scales = parts["nested_quant_map"].float()[scales.int()] * outer + offset
    codes, table = parts["codes"].flatten(), parts["quant_map"].float()
    count = math.prod(shape)
    numbers = looked_up(codes, table, lowest_first=False)[:count]
    return numbers.mul_(scales.float().repeat_interleave(min(size, count))[:count]).view(shape)


_KEY = "quantization_config"
_METHODS: dict[str, Callable[[Given], Format]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}
# How the weights were found, how other programs compute with them, and which layers have ordinary weights, which the
# names of the tensors tell too.
_WITHOUT_EFFECT = frozenset(
    {
        "activation_scheme", "activation_scale_ub", "fmt", "scale_fmt", "modules_to_not_convert", "dequantize",
        "ignore", "lm_head", "quantization_status", "kv_cache_scheme", "global_compression_ratio", "desc_act", "sym",
        "damp_percent", "static_groups", "true_sequential", "model_name_or_path", "model_file_base_name", "quantizer",
        "meta", "pack_dtype", "dataset", "tokenizer", "batch_size", "block_name_to_quantize", "cache_block_outputs",
        "exllama_config", "use_exllama", "disable_exllama", "max_input_length", "model_seqlen",
        "module_name_preceding_first_block", "pad_token_id", "modules_in_block_to_quantize", "use_cuda_fp16",
        "backend", "act_group_aware", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "load_in_4bit",
        "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
        "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight",
        "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold", "quant_library", "version",
    }
)  # fmt: skip


# The ends of the names of scales of activations and caches, which SheepOp does not round.
_LEFT_OUT = (".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")


class Quantisation(NamedTuple):
    """The method and the format of a checkpoint's weights, and keys of its description that were ignored."""

    method: str
    format: Format
    ignored: tuple[str, ...]


def take_quantisation(keys: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Quantisation | None]:
    """Returns the keys without `quantization_config`, and what it describes; None if there is none.

    Raises `CheckpointError` for a method or a layout that SheepOp does not read.
    """
    rest = {name: value for name, value in keys.items() if name != _KEY}
    if not keys.get(_KEY):
        return rest, None
    given = Given(keys, where).within(_KEY, keys[_KEY])
    bits = given.take("load_in_4bit", False) or given.take("load_in_8bit", False)
    method = given.take("quant_method", "bitsandbytes" if bits else None)
    if not isinstance(method, str) or method not in _METHODS:
        raise given.problem(
            "quant_method",
            f"is a format of quantised weights that SheepOp does not read; it reads {', '.join(_METHODS)}. "
            "Export the model in float16 or bfloat16 first",
        )
    found = _METHODS[method](given)
    return rest, Quantisation(method, found, tuple(name for name in given.unread() if name not in _WITHOUT_EFFECT))


def dequantised(
    tensors: Mapping[str, LazyTensor], quantisation: Quantisation, dtype: torch.dtype, place: Path
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Returns the tensors with each quantised weight as one of `dtype`, and notes for the user.

    `place` is the directory in errors. Raises `CheckpointError` if parts are missing or do not fit each other; reading
    raises it for groups without a scale.
    """
    method, layout, ignored = quantisation
    found = dict(tensors)
    weights: dict[str, LazyTensor] = {}
    problems: list[str] = []
    end = layout.names["codes"]
    for name, codes in tensors.items():
        if not name.endswith(end) or codes.dtype not in layout.dtypes:
            continue
        layer = name.removesuffix(end)
        names = {part: layer + ending for part, ending in layout.names.items() if layer + ending in tensors}
        if missing := [part for part in layout.names if part not in names and part not in layout.optional]:
            problems.append(f"{name} is quantised, but {layer}{layout.names[missing[0]]} is missing")
            continue
        parts = {part: found.pop(full) for part, full in names.items() if full in found}
        try:
            weights[layer + layout.target] = _lazily(layout, parts, f"{place}: {name}")
        except ValueError as error:
            problems.append(f"{name} cannot be read: {error}")
    problems += [f"{name} is stored twice, also in {method}" for name in weights if name in found]
    if problems:
        raise CheckpointError(f"The weights in {place} do not fit the method {method}: {listed(problems)}.")
    left_out = [name for name in found if name.endswith(_LEFT_OUT)]
    for name in left_out:
        del found[name]
    notes = [
        f"{len(weights)} weights, which are stored with {method}, are converted to {str(dtype).removeprefix('torch.')}."
    ]
    if left_out:
        notes.append(f"Left out, because SheepOp does not round activations: {listed(left_out, 3)}.")
    if ignored:
        notes.append(f"Ignored keys of {_KEY}: {first_few(ignored, 20)}.")
    return found | converted(weights, dtype), notes


def dtype_of_model(keys: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """Returns the dtype that the configuration names, else that of the largest tensor with ordinary numbers."""
    for table in (keys, keys.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            name = table.get(key) if isinstance(table, dict) else None
            if isinstance(name, str) and name in DTYPES:
                return DTYPES[name]
    ordinary = [tensor for tensor in tensors.values() if tensor.dtype in FLOATS]
    return max(ordinary, key=lambda tensor: tensor.count).dtype if ordinary else torch.bfloat16


def _lazily(layout: Format, parts: Parts, where: str) -> LazyTensor:
    def read() -> Tensor:
        try:
            return layout.values({name: part.read() for name, part in parts.items()})
        except ValueError as error:
            raise CheckpointError(f"{where} cannot be read: {error}.") from None

    return LazyTensor(layout.shape(parts), torch.float32, read)
