"""Static pictures of a trace: each is a figure with its numbers as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sheepop.core.facts import counted, visible_line
from sheepop.generate import GenerationConfig
from sheepop.generate.warping import apply_temperature, apply_top_k, apply_top_p
from sheepop.interpret.lens import Lens, TraceComparison, embedding_map, residual_norms
from sheepop.interpret.parts import Attribution
from sheepop.interpret.trace import Trace, attentions_of
from sheepop.report.figures import bare_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

# The most labels of an axis that are readable, beyond which some are left out, and the most characters of a label.
_MOST_LABELS, _LABEL = 48, 14
_WRITTEN_CELLS = 24
_FIRST, _SECOND = "#0072b2", "#e69f00"


@dataclass(frozen=True)
class Picture:
    """A figure with its name and its numbers."""

    name: str
    figure: Figure
    data: dict[str, Any]


def labels_of(trace: Trace) -> list[str]:
    """The labels of the tokens of a trace; see `label_of`."""
    return [label_of(token.text) for token in trace.tokens]


def attention_pictures(trace: Trace) -> Iterator[Picture]:
    """The weights of all heads for every attention layer: a row is a query, a column a key.

    The pictures are named ``attention_L0``, for an encoder ``encoder_attention_L0``, and for attention from a target to
    its source ``cross_attention_L0``.
    """
    sources = [label_of(token.text) for token in trace.source_tokens]
    for stream in trace.streams:
        queries, encoder = (sources, "encoder_") if stream is trace.source else (labels_of(trace), "")
        for layer, (path, block) in enumerate(stream.paths()):
            for kind, _ in attentions_of(block):
                keys = sources if kind == "cross_attention" else queries
                weights_HTS = trace[f"{path}.{kind}.weights"].float().cpu()
                data = {"tokens": queries, "keys": keys, "weights": weights_HTS.tolist()}
                yield Picture(f"{encoder}{kind}_L{layer}", _draw_heads(weights_HTS, layer, queries, keys), data)


def _draw_heads(weights_HTS: Tensor, layer: int, queries: Sequence[str], keys: Sequence[str]) -> Figure:
    columns = math.ceil(math.sqrt(len(weights_HTS)))
    rows = math.ceil(len(weights_HTS) / columns)
    wide, high = (min(4.5, max(2.2, 0.16 * len(labels) + 1.2)) for labels in (keys, queries))
    figure = bare_figure(wide * columns + 0.8, high * rows + 0.5)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for head, weights_TS in enumerate(weights_HTS):
        cell = axes[head // columns, head % columns]
        image = cell.imshow(weights_TS.numpy(), vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
        cell.set_title(f"Head {layer}.{head}", loc="left", fontsize=9)
        name_ticks(cell, "y", queries if head % columns == 0 else [])
        name_ticks(cell, "x", keys if head + columns >= len(weights_HTS) else [])
    for empty in range(len(weights_HTS), rows * columns):
        axes[empty // columns, empty % columns].set_axis_off()
    figure.colorbar(image, ax=axes, shrink=min(1.0, 3 / (high * rows)), label="Attention weight")
    return figure


def lens_picture(trace: Trace, lens: Lens) -> Picture:
    """The likeliest next token at every layer and position; colour is its probability."""
    labels, best = labels_of(trace), lens.probabilities[..., 0]
    words = [[label_of(trace.text_of(int(token_id))) for token_id in row] for row in lens.ids[..., 0]]
    title = "Next token predicted at each layer"
    figure, axes = _layer_map(trace, best, title, "Probability", width=0.75, vmax=1, cmap="Blues")
    if len(labels) <= _WRITTEN_CELLS:
        for row, found in enumerate(reversed(words)):
            for column, word in enumerate(found):
                color = "white" if float(best.flip(0)[row, column]) > 0.6 else "black"
                axes.text(column, row, word, ha="center", va="center", fontsize=7, color=color, parse_math=False)
    data = {"tokens": labels, "layers": _layer_names(trace), "words": words, "probabilities": best.tolist()}
    return Picture("lens", figure, {**data, "divergence": lens.divergence.tolist(), "entropy": lens.entropy.tolist()})


def _layer_map(
    trace: Trace, numbers_LT: Tensor, title: str, meaning: str, *, width: float, **colours: Any
) -> tuple[Figure, Axes]:
    """A map of a number at every layer, the last one on top, and every token; `width` is that of a token in inches."""
    labels, layers = labels_of(trace), _layer_names(trace)
    size = min(20, max(5, width * len(labels) + 2)), max(2.6, 0.32 * len(layers) + 1.4)
    figure, axes = panel(*size, title)
    image = axes.imshow(numbers_LT.flip(0).numpy(), vmin=0, aspect="auto", interpolation="nearest", **colours)
    name_ticks(axes, "x", labels)
    axes.set_yticks(range(len(layers)), layers[::-1], fontsize=8)
    figure.colorbar(image, ax=axes, label=meaning)
    return figure, axes


def norms_picture(trace: Trace) -> Picture:
    """The length of the residual stream at every layer, one line per token."""
    norms = residual_norms(trace.target)
    figure, axes = panel(7, 4, "Length of the residual stream")
    axes.plot(norms.numpy(), color=_FIRST, alpha=max(0.08, 0.8 / math.sqrt(len(norms[0]))), linewidth=1)
    axes.plot(norms.median(1).values.numpy(), color=_SECOND, linewidth=2, label="Median of the tokens")
    axes.set(xlabel="Blocks passed", ylabel="Length", yscale="log")
    axes.set_xticks(range(0, len(norms), math.ceil(len(norms) / 12)))
    axes.legend(frameon=False, fontsize=8)
    plain(axes)
    return Picture("residual_norms", figure, {"tokens": labels_of(trace), "norms": norms.tolist()})


def comparison_picture(trace: Trace, found: TraceComparison) -> Picture:
    """How far the second model's residual stream is from the first one's, at every layer and token."""
    title, meaning = "Difference of the second model", "Distance over length"
    figure, _ = _layer_map(trace, found.distance, title, meaning, width=0.5, cmap="Oranges")
    names = {"tokens": labels_of(trace), "layers": _layer_names(trace)}
    data = {name: getattr(found, name).tolist() for name in ("distance", "cosine", "divergence")}
    return Picture("comparison", figure, {**names, **data, "changed": found.changed})


def embedding_picture(trace: Trace) -> Picture:
    """The prompt's tokens on the two axes of largest variance of their embeddings."""
    found = embedding_map(trace.model, [*(trace.prompt.source_ids or []), *trace.token_ids])
    figure, axes = panel(6.5, 5.5, "Embeddings of the prompt's tokens")
    across, up = found.points.T.tolist()
    axes.scatter(across, up, color=_FIRST, s=18)
    words = [label_of(trace.text_of(token_id)) for token_id in found.token_ids]
    for (x, y), word in zip(found.points.tolist(), words, strict=True):
        axes.annotate(word, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8, parse_math=False)
    shares = [f"{share:.1%}" for share in found.explained]
    axes.set(xlabel=f"First axis ({shares[0]} of the variance)", ylabel=f"Second axis ({shares[1]})")
    plain(axes)
    data = {"tokens": words, "points": found.points.tolist(), "explained": list(found.explained)}
    return Picture("embedding_map", figure, data)


def next_token_picture(trace: Trace, position: int, config: GenerationConfig, count: int = 20) -> Picture:
    """Draws the likeliest tokens after a position, before and after temperature, top-k and top-p."""
    logits = trace.logits_behind(position)[None].float().cpu()
    scores = apply_temperature(logits, config.temperature or 1.0)
    if config.top_k is not None:
        scores = apply_top_k(scores, config.top_k)
    if config.top_p < 1:
        scores = apply_top_p(scores, config.top_p)
    before, after = logits.softmax(-1)[0], scores.softmax(-1)[0]
    best = before.topk(min(count, len(before))).indices
    words = [label_of(trace.text_of(token_id)) for token_id in best.tolist()]
    figure, axes = panel(7, 0.26 * len(words) + 1.4, f"Next token after token {position}")
    rows = np.arange(len(words))
    axes.barh(rows - 0.2, before[best].numpy(), height=0.38, color=_FIRST, label="Unchanged")
    axes.barh(rows + 0.2, after[best].numpy(), height=0.38, color=_SECOND, label=_settings(config))
    axes.set_yticks(rows, words, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("Probability")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    plain(axes)
    data = {"position": position, "token_ids": best.tolist(), "tokens": words, "probabilities": before[best].tolist()}
    return Picture("next_token", figure, {**data, "drawn_with": after[best].tolist(), "settings": _settings(config)})


def attribution_picture(trace: Trace, found: Attribution, count: int = 20) -> Picture:
    """The parts of the network that raise or lower a logit the most."""
    order = sorted(range(len(found.values)), key=lambda part: -abs(found.values[part]))
    shown = order[:count]
    names, values = [found.names[part] for part in shown], [found.values[part] for part in shown]
    if rest := [found.values[part] for part in order[count:]]:
        names, values = [*names, counted(len(rest), "other")], [*values, sum(rest)]
    word = label_of(trace.text_of(found.token_id))
    against = "" if found.rival is None else f" against {label_of(trace.text_of(found.rival))}"
    title = f"Contributions to {word}{against} after token {found.position}: {found.total:.2f} in all"
    figure, axes = panel(7, 0.24 * len(names) + 1.4, title)
    axes.barh(range(len(names)), values, color=[_FIRST if value >= 0 else _SECOND for value in values])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="#848b94", linewidth=0.8)
    axes.set_xlabel("Nats")
    plain(axes)
    data = {"position": found.position, "token_id": found.token_id, "rival": found.rival, "total": found.total}
    return Picture("attribution", figure, {**data, "parts": dict(zip(found.names, found.values, strict=True))})


def _layer_names(trace: Trace) -> list[str]:
    return ["embedding", *(f"block {layer}" for layer in range(trace.num_layers))]


def _settings(config: GenerationConfig) -> str:
    parts = [f"temperature {config.temperature:g}"]
    parts += [] if config.top_k is None else [f"top-k {config.top_k}"]
    parts += [f"top-p {config.top_p:g}"] if config.top_p < 1 else []
    return ", ".join(parts)


def panel(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure of one panel; its size is in inches."""
    figure = bare_figure(width, height)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    return figure, axes


def name_ticks(axes: Axes, side: str, labels: Sequence[str]) -> None:
    """Labels the rows or columns of a map, at even distances if there are too many."""
    step = max(1, math.ceil(len(labels) / _MOST_LABELS))
    ticks, names = range(0, len(labels), step), labels[::step]
    if side == "x":
        axes.set_xticks(ticks, names, rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_yticks(ticks, names, fontsize=7, parse_math=False)


def plain(axes: Axes) -> None:
    """Gives a panel small numbers, a faint grid, and no frame above and on the right."""
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_of(text: str) -> str:
    """A token as a label, with visible spaces and line ends; a character that the font lacks becomes its number."""
    shown = visible_line(text).replace("\t", "\\t").replace(" ", "\u2423")
    cut = shown if len(shown) <= _LABEL else f"{shown[: _LABEL - 1]}…"
    return "".join(letter if ord(letter) in _glyphs() else f"U+{ord(letter):04X}" for letter in cut)


@cache
def _glyphs() -> frozenset[int]:
    """The characters that the font of the pictures has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
