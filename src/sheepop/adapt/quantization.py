"""Weight-only quantisation: weights rounded to 8 or 4 bits take a quarter or a sixth of the memory of float32.

Each row of int8 or fp8 shares a scale s; a weight w becomes the integer, or 8-bit float, nearest to w / s. Each group
of 32 neighbours in a row of int4 shares a scale and an offset o; w becomes the integer from 0 to 15 nearest to
(w - o) / s.
Activations are not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import Format, StoredWeight
from sheepop.adapt.tiles import GROUP
from sheepop.core.errors import UsageError
from sheepop.model import Transformer
from sheepop.model.experts import Experts
from sheepop.model.ngrams import NgramEmbedding

QUANTIZED: tuple[Format, ...] = ("int8", "int4", "fp8")
_LEVELS = 15  # the largest int4 code
# Candidates for the number of steps between the least and the largest weight of an int4 group: with more than 15, the
# extremes are clipped, which can reduce the other weights' error.
_SPANS = (13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0, 18.0)
_CHUNK = 2**17
_TINY = 1e-30  # no scale is 0

# int4 leaves these at int8. The errors of the vocabulary concern every token and every logit. Values and the outputs of
# feed-forward networks add to the residual stream: as in llama.cpp's mixtures, those of the first and last blocks and
# of every third one between are more exact.
_OF_VOCABULARY = ("embedding.weight", "lm_head.weight")
_OF_RESIDUALS = re.compile(r"blocks\.(\d+)\..*(v_proj|down_proj)(\.weight)?")


def quantized(weight: Tensor, stored: Format, importance: Tensor | None = None) -> StoredWeight:
    """Quantises float matrices (..., N, K); raises `UsageError` if int4 groups do not divide a row.

    `importance` (K,) weighs the squared errors of columns when int4 scales are chosen.
    """
    length = weight.shape[-1]
    if stored == "int4" and length % GROUP:
        raise UsageError(f"int4 needs rows whose length is a multiple of {GROUP}, got {length}. Use int8.")
    weighing = (torch.ones(length) if importance is None else importance).to(weight.device)
    rows = weight.detach().flatten(0, -2)
    # A few rows at a time stay in the processor's cache.
    found = []
    for part in torch.split(rows, max(1, _CHUNK // length)):
        wide = part.float()
        found.append(_int4(wide, weighing) if stored == "int4" else _by_rows(wide, stored))
    values, scales, *offsets = (
        torch.unflatten(torch.cat(list(kind)), 0, weight.shape[:-1]) for kind in zip(*found, strict=True)
    )
    return StoredWeight(stored, values, scales, weight.dtype, *offsets, in_place=True)


def quantize(model: Transformer, stored: Format, importance: Mapping[Tensor, Tensor] | None = None) -> Transformer:
    """Returns a copy of the network with quantised matrices; norms, biases and routers are unchanged.

    int4 leaves the embedding, the output projection, and some value and down projections at int8. A tied embedding
    stays tied. `importance` are the columns' weights from `input_importance`. Raises `UsageError` like `quantized`.
    """
    replaced = {}
    for name, weight in quantizable(model):
        form: Format = "int8" if stored == "int4" and _is_sensitive(name, model.config.num_layers) else stored
        replaced[weight] = nn.Parameter(quantized(weight, form, (importance or {}).get(weight)), False)
    return model.sharing_copy(replaced)


def _is_sensitive(name: str, num_layers: int) -> bool:
    """Whether int4 leaves this matrix at int8."""
    if found := _OF_RESIDUALS.fullmatch(name):
        layer, ends = int(found[1]), num_layers // 8
        return not ends <= layer < num_layers - ends or (layer - ends) % 3 == 2
    return name in _OF_VOCABULARY


def dequantized(model: Transformer) -> Transformer:
    """Returns a copy whose quantised matrices are in the data type they compute in; the others are shared."""
    stored = [weight for weight in model.parameters() if isinstance(weight, StoredWeight) and weight.has_scales]
    return model.sharing_copy({weight: nn.Parameter(weight.rows(), False) for weight in stored})


def input_importance(model: Transformer, rows: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Returns the mean square of each input (K,) of each linear layer over rows of token ids (T,).

    The squared error of a layer's output is about the squared error of its weights, weighted by these.
    """
    sums: dict[Tensor, Tensor] = {}
    counts: dict[Tensor, int] = {}

    def add(layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].detach().float().flatten(0, -2).square()
        sums[layer.weight] = sums.get(layer.weight, torch.zeros(())) + squares.sum(0).cpu()
        counts[layer.weight] = counts.get(layer.weight, 0) + len(squares)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not model.lm_head]
    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    try:
        with torch.inference_mode():
            for row in rows:
                model.hidden_states(row[None].to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return {weight: total / counts[weight] for weight, total in sums.items()}


def quantizable(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and weights of linear layers, embeddings, n-gram tables and experts, tied weights once."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_matrix = parameter.ndim == 2 and isinstance(owner, nn.Linear | nn.Embedding | NgramEmbedding)
        if is_matrix or (parameter.ndim == 3 and isinstance(owner, Experts)):
            yield name, parameter


def _by_rows(weight_NK: Tensor, stored: Format) -> tuple[Tensor, Tensor]:
    """Scales each row so that its largest weight becomes 127 in int8, or 448, the largest number of e4m3, in fp8."""
    largest = 127 if stored == "int8" else torch.finfo(torch.float8_e4m3fn).max
    scales_N = weight_NK.abs().amax(1).clamp(min=_TINY) / largest
    if stored == "int8":
        return _codes(weight_NK, scales_N[:, None], -127, 127).to(torch.int8), scales_N
    return (weight_NK / scales_N[:, None]).to(torch.float8_e4m3fn), scales_N


def _int4(weight_NK: Tensor, importance_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses for each group the candidate whose scale and offset, fitted by least squares, have the least error."""
    groups_NGC = weight_NK.view(len(weight_NK), -1, GROUP)
    weighing_GC = importance_K.float().view(-1, GROUP)
    # Groups of columns that are always 0 count evenly.
    weighing_GC = torch.where(weighing_GC.sum(-1, keepdim=True) > 0, weighing_GC, 1.0)
    low_NG1 = groups_NGC.amin(-1, keepdim=True)
    range_NG1 = (groups_NGC.amax(-1, keepdim=True) - low_NG1).clamp(min=_TINY)
    total_G1 = weighing_GC.sum(-1, keepdim=True)
    mean_NG1 = (weighing_GC * groups_NGC).sum(-1, keepdim=True) / total_G1
    least_NG1 = torch.full_like(low_NG1, torch.inf)
    best_scale_NG1, best_offset_NG1 = low_NG1, low_NG1
    for span in _SPANS:
        scale_NG1 = range_NG1 / span
        # The clipped ends share the error.
        offset_NG1 = low_NG1 + (range_NG1 - scale_NG1 * _LEVELS) / 2 if span > _LEVELS else low_NG1
        codes_NGC = _codes(groups_NGC - offset_NG1, scale_NG1, 0, _LEVELS)
        middle_NG1 = (weighing_GC * codes_NGC).sum(-1, keepdim=True) / total_G1
        moved_NGC = weighing_GC * (codes_NGC - middle_NG1)
        spread_NG1 = (moved_NGC * codes_NGC).sum(-1, keepdim=True)
        slope_NG1 = (moved_NGC * groups_NGC).sum(-1, keepdim=True) / spread_NG1
        scale_NG1 = torch.where(spread_NG1 > 0, slope_NG1, scale_NG1).bfloat16().float()
        scale_NG1 = torch.where(scale_NG1.abs() < _TINY, _TINY, scale_NG1)
        offset_NG1 = (mean_NG1 - scale_NG1 * middle_NG1).bfloat16().float()
        codes_NGC = _codes(groups_NGC - offset_NG1, scale_NG1, 0, _LEVELS)
        error_NGC = codes_NGC.mul_(scale_NG1).add_(offset_NG1).sub_(groups_NGC).square_().mul_(weighing_GC)
        error_NG1 = error_NGC.sum(-1, keepdim=True)
        better_NG1 = error_NG1 < least_NG1
        least_NG1 = torch.where(better_NG1, error_NG1, least_NG1)
        best_scale_NG1 = torch.where(better_NG1, scale_NG1, best_scale_NG1)
        best_offset_NG1 = torch.where(better_NG1, offset_NG1, best_offset_NG1)
    codes_NGC = _codes(groups_NGC - best_offset_NG1, best_scale_NG1, 0, _LEVELS).to(torch.uint8)
    low, high = codes_NGC.chunk(2, -1)
    scales_NG, offsets_NG = best_scale_NG1[..., 0].bfloat16(), best_offset_NG1[..., 0].bfloat16()
    return (low | (high << 4)).flatten(1), scales_NG, offsets_NG


def _codes(weight: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return (weight / scale).round_().clamp_(least, most)


def weight_bytes(weights: Iterable[Tensor]) -> int:
    """Returns the size of `weights` as they are stored in memory."""
    return sum(weight.stored_bytes if isinstance(weight, StoredWeight) else weight.nbytes for weight in weights)
