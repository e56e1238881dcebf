"""The health of single layers: how fast weights move, how large scores are, which heads and units are dead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from sheepop.interpret.control.operating_point import stepwise_attention
from sheepop.model import Transformer
from sheepop.model.attention.layer import Attention
from sheepop.model.probe import named_probes, watch
from sheepop.train.tensor_batch import TensorBatch

# A head, or a hidden unit, with less than this share of the largest one of its layer does nothing. Single units may be
# a thousand times as large as usual ones (Sun et al. 2024, "Massive activations"), so their share is smaller.
DEAD_HEAD, DEAD_UNIT = 1e-4, 1e-7
_MOST_POSITIONS = 512  # of a batch, for which the heads are compared


@dataclass(frozen=True)
class LayerHealth:
    """What one pass over a batch shows.

    `attention_logits` has the largest score of each attention layer by path, `dead_heads` names heads, such as
    ``blocks.0.attention head 3``, and `dead_units` has the share of dead units of each feed-forward layer that has any.
    """

    attention_logits: Mapping[str, float]
    dead_heads: tuple[str, ...]
    dead_units: Mapping[str, float]


def update_ratios(before: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, float]:
    """The length of the update of each matrix over the length of the matrix, largest first; about 0.001 is usual.

    A matrix of zeros, as some are before their first step, has no ratio.
    """
    sizes = {name: float(weight.norm()) for name, weight in before.items() if weight.ndim > 1}
    found = {name: float(update[name].norm()) / size for name, size in sizes.items() if size > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def beside_others(values: Mapping[str, float]) -> dict[str, float]:
    """The number of each matrix of a block over the median of the same matrix in the other blocks.

    Matrices outside blocks have no others, nor have those of a network with one block. A median of 0 is left out.
    """
    alike: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        before, inside, behind = name.rpartition("blocks.")
        if inside:
            alike.setdefault(before + behind.partition(".")[2], {})[name] = value
    found = {}
    for group in alike.values():
        for name, value in group.items():
            others = [other for each, other in group.items() if each != name]
            if others and (middle := median(others)) > 0:
                found[name] = value / middle
    return found


@torch.no_grad()
def layer_health(model: Transformer, batch: TensorBatch) -> LayerHealth:
    """Runs the model once on `batch` and looks at every attention layer and feed-forward network.

    A head is dead if its part of the layer's output is less than 1e-4 of the largest one, and a hidden unit if its
    largest value on the batch is less than 1e-7 of that of the largest unit.
    """
    logits: dict[str, float] = {}
    units: dict[str, float] = {}
    heads: list[str] = []

    def see_scores(path: str, scores: Tensor) -> None:
        logits[path] = float(scores.masked_fill(scores == -torch.inf, torch.finfo(scores.dtype).min).max())

    def see_units(path: str, hidden: Tensor) -> None:
        share = float(_is_below(DEAD_UNIT, hidden.abs().flatten(0, -2).amax(0)).double().mean())
        if share:
            units[path] = share

    def see_heads(path: str, outputs_BHTC: Tensor) -> None:
        attention = model.get_submodule(path)
        assert isinstance(attention, Attention)
        for number in _is_below(DEAD_HEAD, _head_sizes(attention, outputs_BHTC)).nonzero().flatten().tolist():
            heads.append(f"{path} head {number}")

    observers = {}
    for name in named_probes(model):
        path, _, probe = name.rpartition(".")
        if probe == "hidden" and path.endswith(".feed_forward"):
            observers[name] = partial(see_units, path)
        elif probe == "head_outputs" and isinstance(model.get_submodule(path), Attention):
            observers[name] = partial(see_heads, path)
    with stepwise_attention(model, see_scores), watch(model, observers):
        model.hidden_states(**batch.inputs)
    return LayerHealth(logits, tuple(heads), units)


def _is_below(share: float, sizes: Tensor) -> Tensor:
    return sizes < share * sizes.max()


def _head_sizes(attention: Attention, outputs_BHTC: Tensor) -> Tensor:
    """The root mean square (H,) of what each head alone adds to the residual stream."""
    outputs_HNC = outputs_BHTC.transpose(0, 1).flatten(1, 2)[:, :_MOST_POSITIONS]
    heads, positions, width = outputs_HNC.shape
    alone = outputs_HNC.new_zeros(heads, positions, heads, width)
    for head in range(heads):
        alone[head, :, head] = outputs_HNC[head]
    bias = attention.o_proj(alone.new_zeros(1, heads * width))
    return (attention.o_proj(alone.flatten(2)) - bias).square().mean((1, 2)).sqrt()
