"""The numbers of one picture: tokens that pass through a whole network, and what each part adds to the next one.

The picture shows a window of the tokens. Along each token run a few of its D numbers, from the embedding on, after
each attention and after each block. Between tokens it shows how much each attends to which, and next to the network
the likeliest next tokens after one of them.

Shapes: W tokens of the window, L layers, P points along the stream (2 L + 1), K shown numbers of a vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sheepop.core.errors import DataError
from sheepop.interpret.parts import Attribution, direct_attribution, part_cuts
from sheepop.interpret.store import StoredTrace
from sheepop.interpret.trace import Keep, Trace

MOST_TOKENS = 60
_CHANNELS, _NEXT = 8, 10
# The share of a vector's numbers that its scale covers, and how many times the scale a giant channel has.
_COVERED, _GIANT = 0.99, 10.0
_HEAD = re.compile(r"(?:cross )?(?:head|attention bias|attention norm|mixer|mixer norm) (\d+)(?:\.\d+)?")
_FORWARD = re.compile(r"(?:feed-forward|feed-forward norm|layer input) (\d+)")


@dataclass(frozen=True, eq=False)
class Journey:
    """A window of W tokens from `start` on, seen from the token at `position`.

    `stream` (P, W, K) has the `channels` of the residual stream that vary most over the window, before the first block,
    after the attention of each block, and after each block. `scale` (P, W) is the magnitude that 99 percent of all D
    numbers of a vector do not exceed: one channel may be a hundred times as large as the others (Dettmers et al. 2022,
    "LLM.int8()"), and is named in `giants`, with the most scales that it has, if these are at least 10.
    `weights` has for each layer the attention weights (W, W) between the tokens of the window, as a mean over heads, or
    None for a layer that mixes tokens without attention. `adds` are the contributions, in logits, to the likeliest
    token after `position`: of the embedding, of both branches of each layer, and of the rest.
    """

    start: int
    position: int
    channels: list[int]
    stream: Tensor
    scale: Tensor
    giants: dict[int, float]
    weights: list[Tensor | None]
    mixed_by: list[str]
    winner: int
    adds: dict[str, float]
    parts: Attribution

    def to_dict(self, trace: Trace | StoredTrace) -> dict[str, Any]:
        """The journey as plain data, with the window's tokens and the likeliest next ones after `position`."""
        behind = trace.predictions[self.position]
        count = self.stream.shape[1]
        strongest = sorted(zip(self.parts.names, self.parts.values, strict=True), key=lambda part: -abs(part[1]))
        return {
            "start": self.start, "position": self.position, "length": trace.num_tokens,
            "tokens": [
                {"text": token.text, "id": token.id, "position": token.position}
                for token in trace.tokens[self.start : self.start + count]
            ],
            "channels": self.channels, "width": trace.config.d_model, "heads": trace.config.num_heads,
            "stream": [[[_short(x) for x in row] for row in point] for point in self.stream.tolist()],
            "scale": [[_short(x) for x in row] for row in self.scale.tolist()],
            "giants": [{"channel": channel, "times": float(f"{times:.2g}")} for channel, times in self.giants.items()],
            "weights": [
                None if each is None else [_without_end(row) for row in each.double().round(decimals=5).tolist()]
                for each in self.weights
            ],
            "mixed_by": self.mixed_by, "adds": self.adds, "total": self.parts.total,
            "parts": [{"name": name, "nats": value} for name, value in strongest[:16]],
            "next": [{"id": each, "text": trace.text_of(each), "probability": p} for each, p in behind.top[:_NEXT]],
        }  # fmt: skip


@torch.no_grad()
def journey_of(trace: Trace, position: int, start: int | None = None, channels: Sequence[int] | None = None) -> Journey:
    """The journey of the target's tokens around `position`; a window of at most 60 ends at `position` by default.

    `channels` are the numbers of a vector that are shown instead of those that vary most. Raises `IndexError` for a
    position, a start or a channel out of range.
    """
    position = range(trace.num_tokens)[position]
    window, cuts = _window(trace, position, start), part_cuts(trace, position)
    inside = _cuts(trace, window)
    found = trace.collect(inside | cuts, inside | cuts)
    parts = direct_attribution(trace, position, trace.predictions[position].top[0][0], values=found)
    return _journey(trace, window, found, channels, parts)


@torch.no_grad()
def stored_journey(stored: StoredTrace, channels: Sequence[int] | None = None) -> Journey:
    """The journey of a trace on disk, seen from its last token; `channels` as for `journey_of`.

    Raises `DataError` for a trace without the tensors inside its blocks or without contributions.
    """
    if stored.contributions is None or not stored.is_whole:
        raise DataError(f"{stored.directory} has no tensors inside the blocks, or no contributions. Trace again.")
    position, (winner, _) = stored.num_tokens - 1, stored.predictions[-1].top[0]
    names, values = zip(*stored.contributions.items(), strict=True)
    window = _window(stored, position, None)
    cuts = _cuts(stored, window)
    parts = Attribution(position, winner, None, list(names), list(values))
    return _journey(stored, window, stored.collect(cuts, cuts), channels, parts)


def _window(trace: Trace | StoredTrace, position: int, start: int | None) -> slice:
    start = max(0, position - MOST_TOKENS + 1) if start is None else range(trace.num_tokens)[start]
    return slice(start, min(start + MOST_TOKENS, trace.num_tokens))


def _cuts(trace: Trace | StoredTrace, window: slice) -> dict[str, Keep]:
    """What the picture needs from inside the blocks, each with the function that keeps a window of it."""
    layers = range(trace.num_layers)
    weights = [name for layer in layers if (name := _weights(layer)) in trace.names]
    middles = [middle for layer in layers if (middle := _middle(trace, layer)) is not None]
    return dict.fromkeys(weights, _window_of_mean(window)) | dict.fromkeys(middles, _rows(window))


def _journey(
    trace: Trace | StoredTrace,
    window: slice,
    found: Mapping[str, Tensor],
    channels: Sequence[int] | None,
    parts: Attribution,
) -> Journey:
    before = trace.residuals[:, window].float().cpu()
    points = [before[:1]]
    for layer in range(trace.num_layers):
        name = _middle(trace, layer)
        points += [before[layer : layer + 1] if name is None else found[name][None], before[layer + 1 : layer + 2]]
    stream = torch.cat(points)
    chosen = _varied(stream) if channels is None else [range(stream.shape[-1])[channel] for channel in channels]
    shown, weights = stream[..., chosen], [found.get(_weights(layer)) for layer in range(trace.num_layers)]
    scale = _scale(stream)
    times = (shown.abs() / scale[..., None].clamp(min=1e-30)).amax((0, 1)).tolist()
    largest_first = sorted(zip(chosen, times, strict=True), key=lambda each: -each[1])
    giants = {channel: most for channel, most in largest_first if most >= _GIANT}
    return Journey(
        window.start, parts.position, chosen, shown, scale, giants, weights,
        ["mixer" if each is None else "attention" for each in weights],
        parts.token_id, _grouped(zip(parts.names, parts.values, strict=True), trace.num_layers), parts,
    )  # fmt: skip


def _weights(layer: int) -> str:
    return f"blocks.{layer}.attention.weights"


def _varied(stream_PWD: Tensor) -> list[int]:
    """The channels that vary most. Each vector counts alike, although the stream grows from block to block."""
    # The vector of the first token is often huge.
    scale = stream_PWD.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    spread = (stream_PWD / scale).std((0, 1), correction=0).nan_to_num(-1.0)
    return sorted(spread.topk(min(_CHANNELS, stream_PWD.shape[-1])).indices.tolist())


def _scale(stream_PWD: Tensor) -> Tensor:
    """The magnitude that 99 percent of the numbers of each vector do not exceed; the largest one if that is 0."""
    magnitudes = stream_PWD.abs()
    covered = magnitudes.kthvalue(math.ceil(_COVERED * magnitudes.shape[-1]), -1).values
    return torch.where(covered > 0, covered, magnitudes.amax(-1))


def _middle(trace: Trace | StoredTrace, layer: int) -> str | None:
    """The probe behind the attention of a block; None if its two branches read the same stream."""
    names = (f"blocks.{layer}.upper_middle", f"blocks.{layer}.middle")
    return next((name for name in names if name in trace.names), None)


def _window_of_mean(window: slice) -> Keep:
    return lambda weights_HTS: weights_HTS[:, window, window].float().mean(0).cpu()


def _rows(window: slice) -> Keep:
    return lambda value_TD: value_TD[window].float().cpu()


def _grouped(parts: Iterable[tuple[str, float]], num_layers: int) -> dict[str, float]:
    """Sums of the parts: ``embedding``, ``attention.N``, ``forward.N``, and ``rest``; together they are the total."""
    names = ["embedding", *(f"{kind}.{layer}" for layer in range(num_layers) for kind in ("attention", "forward"))]
    sums = dict.fromkeys([*names, "rest"], 0.0)
    for name, value in parts:
        if match := _HEAD.fullmatch(name):
            sums[f"attention.{match[1]}"] += value
        elif match := _FORWARD.fullmatch(name):
            sums[f"forward.{match[1]}"] += value
        else:
            sums["embedding" if name in ("token", "n-grams", "position") else "rest"] += value
    return sums


def _without_end(row: list[float]) -> list[float]:
    """A row of weights without the zeros behind its last other number, such as those of later tokens."""
    count = len(row)
    while count and not row[count - 1]:
        count -= 1
    return row[:count]


def _short(value: float) -> float:
    """Four significant digits, as more cannot be seen."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
