"""Checkpoints with quantised weights: `quantization_config` tells the format, and reading a weight dequantises it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sheepop.checkpoint.exchange.bitsandbytes import bitsandbytes
from sheepop.checkpoint.exchange.passage import DTYPES, converted
from sheepop.checkpoint.exchange.quantised_formats import (
    FLOATS,
    Format,
    Parts,
    awq,
    compressed_tensors,
    fbgemm_fp8,
    fp8,
    gptq,
    mxfp4,
)
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.weight_files import listed
from sheepop.core.errors import CheckpointError, first_few

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
