"""Weight-only quantisation: weights rounded to 8 or 4 bits take a quarter or an eighth of the memory of float32.

Each row of int8 or fp8, or each group of 32 neighbours in a row of int4, shares a scale s; a weight w becomes the
integer, or 8-bit float, nearest to w / s. Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import GROUP, Format, StoredWeight
from sheepop.core.errors import UsageError
from sheepop.model import Transformer
from sheepop.model.experts import Experts
from sheepop.model.ngrams import NgramEmbedding

QUANTIZED: tuple[Format, ...] = ("int8", "int4", "fp8")
# Candidates for the int4 value of the largest weight before clipping to -8; clipping can reduce other weights' error.
_REACHES = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0, 11.0)
_CHUNK = 2**17
_TINY = 1e-30  # no scale is 0


def quantized(weight: Tensor, stored: Format) -> StoredWeight:
    """Quantises float matrices (..., N, K); raises `UsageError` if int4 groups do not divide a row."""
    length = weight.shape[-1]
    if stored == "int4" and length % GROUP:
        raise UsageError(f"int4 needs rows whose length is a multiple of {GROUP}, got {length}. Use int8.")
    rounded = {"int8": _int8, "int4": _int4, "fp8": _fp8}[stored]
    rows = weight.detach().flatten(0, -2)
    # A few rows at a time stay in the processor's cache.
    parts = [rounded(part.float()) for part in torch.split(rows, max(1, _CHUNK // length))]
    values, scales = (torch.unflatten(torch.cat(list(kind)), 0, weight.shape[:-1]) for kind in zip(*parts, strict=True))
    return StoredWeight(stored, values, scales, weight.dtype)


def quantize(model: Transformer, stored: Format) -> Transformer:
    """Returns a copy of the network with quantised matrices; norms, biases and routers are unchanged.

    A tied embedding stays tied. Raises `UsageError` like `quantized`.
    """
    return model.sharing_copy(
        {weight: nn.Parameter(quantized(weight, stored), False) for _, weight in quantizable(model)}
    )


def quantizable(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and weights of linear layers, embeddings, n-gram tables and experts, tied weights once."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_matrix = parameter.ndim == 2 and isinstance(owner, nn.Linear | nn.Embedding | NgramEmbedding)
        if is_matrix or (parameter.ndim == 3 and isinstance(owner, Experts)):
            yield name, parameter


def _int8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    scales_N = weight_NK.abs().amax(1).clamp(min=_TINY) / 127
    return _codes(weight_NK, scales_N[:, None], -127, 127).to(torch.int8), scales_N


def _fp8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each row so that its largest weight becomes 448, the largest number of e4m3."""
    scales_N = weight_NK.abs().amax(1).clamp(min=_TINY) / torch.finfo(torch.float8_e4m3fn).max
    return (weight_NK / scales_N[:, None]).to(torch.float8_e4m3fn), scales_N


def _int4(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Chooses for each group the candidate scale with the least squared error."""
    groups_NGC = weight_NK.view(len(weight_NK), -1, GROUP)
    # Integers reach from -8 to 7: the scale's sign makes the largest weight of a group negative.
    extremes_NG1 = groups_NGC.gather(-1, groups_NGC.abs().argmax(-1, keepdim=True))
    extremes_NG1 = torch.where(extremes_NG1.abs() < _TINY, _TINY, extremes_NG1)
    least_NG1 = torch.full_like(extremes_NG1, torch.inf)
    best_NG1 = extremes_NG1
    for reach in _REACHES:
        scales_NG1 = (extremes_NG1 / -reach).bfloat16().float()
        moved_NGC = _codes(groups_NGC, scales_NG1, -8, 7).mul_(scales_NG1).sub_(groups_NGC)
        errors_NG1 = moved_NGC.square_().sum(-1, keepdim=True)
        better_NG1 = errors_NG1 < least_NG1
        least_NG1 = torch.where(better_NG1, errors_NG1, least_NG1)
        best_NG1 = torch.where(better_NG1, scales_NG1, best_NG1)
    codes = _codes(groups_NGC, best_NG1, -8, 7).to(torch.int8).view(torch.uint8)
    low, high = codes.chunk(2, -1)
    return ((low & 15) | (high << 4)).flatten(1), best_NG1[..., 0].bfloat16()


def _codes(weight: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return (weight / scale).round_().clamp_(least, most)
