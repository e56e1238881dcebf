"""The coordinate check: whether a step changes activations equally at every width (Yang et al. 2022, appendix D.1).

Under muP the entries of every activation change by about as much in a wide network as in a narrow one, so that a
learning rate tuned at one width fits the others. Shapes: W widths, S steps, P places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.facts import counted
from sheepop.interpret.control.finding import Finding, columns
from sheepop.interpret.pictures import Picture, plain
from sheepop.model import ModelConfig, Transformer
from sheepop.model.probe import named_probes, record
from sheepop.report.figures import bare_figure
from sheepop.train.tensor_batch import TensorBatch

FEWEST_WIDTHS = 3
"""Two points have a line, but no error."""
NOTICED = 1.25
"""The factor for each doubling of the width from which activations are said to grow; its inverse, to fall."""
_ERRORS = 2.0  # standard errors by which a factor must differ from 1
_ROWS, _TOKENS = 4, 64  # of the batch whose activations are compared
_PLACES = {
    "positioned": "embedding",
    "attention.scores": "attention scores",
    "attention_output": "attention output",
    "feed_forward.pre_activation": "pre-activations",
    "feed_forward_output": "feed-forward output",
    "output": "stream",
    "logits": "logits",
}
_COLOURS = ("#848b94", "#d55e00", "#0072b2", "#cc79a7", "#e69f00", "#009e73", "#24292f")
_SCALED = ("num_heads", "num_kv_heads", "sliding_num_kv_heads", "d_ff", "layer_d_ff")
_OWN_WIDTHS = ("latent_attention", "layer_inputs", "gated_delta_net", "experts")

Activations = Mapping[str, Tensor]
"""Activations by the name of their probe."""


def widened(config: ModelConfig, width: int) -> ModelConfig:
    """The network of `config` at another `d_model`, with as many times the heads and hidden units; heads stay as wide.

    Raises `ConfigError` if heads or units are then not whole, or if a part has widths of its own.
    """
    if config.architecture != "decoder":
        raise ConfigError("Coordinates are compared of decoders, and model.architecture is encoder_decoder.")
    if own := [name for name in _OWN_WIDTHS if getattr(config, name) is not None]:
        raise ConfigError(
            f"model.{own[0]} has widths of its own, which do not follow d_model. Check a network without it."
        )
    tree = config.model_dump()
    tree["d_model"] = width
    for name, sizes in _sizes(config).items():
        if any(each * width % config.d_model for each in sizes):
            raise ConfigError(
                f"At the width {width} model.{name} = {tree[name]} is no whole number times {width}/{config.d_model}. "
                "Choose other widths with --width."
            )
        wide = tuple(each * width // config.d_model for each in sizes)
        tree[name] = wide if isinstance(tree[name], tuple) else wide[0]
    if config.position_encoding == "sinusoidal" and config.mup_base_d_model is None:
        tree["embedding_scale"] *= math.sqrt(width / config.d_model)
    return ModelConfig(**tree)


def usual_widths(config: ModelConfig) -> tuple[int, ...]:
    """Four widths, each twice the one before: up to the network's own, as far as its heads and units can be halved."""
    sizes = [config.d_model, *(size for each in _sizes(config).values() for size in each)]
    halvings = min(3, *((size & -size).bit_length() - 1 for size in sizes))
    lowest = config.d_model >> halvings
    return tuple(lowest << power for power in range(4))


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The sizes that follow the width: one, or one for each layer."""
    given = {name: getattr(config, name) for name in _SCALED}
    return {name: size if isinstance(size, tuple) else (size,) for name, size in given.items() if size is not None}


def activations_of(model: Transformer, batch: TensorBatch) -> dict[str, Tensor]:
    """The activations of the first tokens of a batch at every place that is compared; scores of later keys are -inf."""
    inputs = {name: rows[:_ROWS, :_TOKENS] for name, rows in batch.inputs.items()}
    names = [name for name in named_probes(model) if _kind(name) is not None]
    with torch.no_grad(), record(model, names) as found:
        model.read_out(model.hidden_states(**inputs))
    return found


def _kind(name: str) -> str | None:
    """The key of `_PLACES` of a probe."""
    _, _, inside = name.partition("blocks.")
    local = inside.partition(".")[2] if inside else name
    return local if local in _PLACES else None


@dataclass(frozen=True)
class Growth:
    """The factor by which a size is multiplied for each doubling of the width, and its interval; NaN if not finite."""

    factor: float
    low: float
    high: float

    @classmethod
    def of(cls, widths: Sequence[int], sizes: Sequence[float]) -> Growth:
        """The factor of a power law through sizes at some widths, by least squares, within two standard errors.

        What is 0 at every width, such as the change of a frozen embedding, has the factor 1.
        """
        if not any(sizes):
            return cls(1.0, 1.0, 1.0)
        x, y = (torch.tensor(values, dtype=torch.float64).log2() for values in (widths, sizes))
        x = x - x.mean()
        slope = (x @ y) / x.square().sum()
        rest = y - y.mean() - slope * x
        error = _ERRORS * (rest.square().sum() / (len(x) - 2) / x.square().sum()).sqrt()
        return cls(*(float(2**value) for value in (slope, slope - error, slope + error)))

    @property
    def direction(self) -> int:
        """1 if the size grows with the width or is not finite, -1 if it falls, 0 if it does neither."""
        if not math.isfinite(self.factor) or (self.factor > NOTICED and self.low > 1):
            return 1
        return -1 if self.factor < 1 / NOTICED and self.high < 1 else 0


@dataclass(frozen=True, eq=False)
class Coordinates(Finding):
    """Sizes of activations over widths and steps, as root mean squares.

    `sizes` (P, W) are those before the first step, and `changes` (S, P, W) those of the differences to them after each
    step. `places` are probes, `rate` is the learning rate, and `is_mup` says whether the networks were built for muP.
    """

    verb: ClassVar[str] = "coordinates"
    widths: tuple[int, ...]
    places: tuple[str, ...]
    sizes: Tensor
    changes: Tensor
    rate: float
    is_mup: bool

    @property
    def at_start(self) -> list[Growth]:
        """The growth of each place before the first step."""
        return [Growth.of(self.widths, row) for row in self.sizes.tolist()]

    @property
    def after(self) -> list[Growth]:
        """The growth of the change of each place after the last step."""
        return [Growth.of(self.widths, row) for row in self.changes[-1].tolist()]

    @property
    def _behind(self) -> str:
        return f"after {counted(len(self.changes), 'step')}"

    def table(self) -> list[str]:
        """For each place the growth before the first step, that of the change after the last one, and the changes."""
        every = zip(self.places, self.at_start, self.after, self.changes[-1].tolist(), strict=True)
        rows = [
            [named(place), start.factor, after.factor, f"{after.low:.2f} to {after.high:.2f}", *changes]
            for place, start, after, changes in every
        ]
        head = ["place", "at start:.2f", "change:.2f", "interval", *(f"d_model {width}:.3g" for width in self.widths)]
        return [f"Factors for each doubling of the width, and changes {self._behind}:", *columns(head, rows)]

    def sentences(self) -> list[str]:
        """Whether activations change equally at every width, and what follows for the learning rate."""
        if broken := (~self.changes.isfinite()).nonzero().tolist():
            step, place, width = broken[0]
            return [
                f"Numbers of the {named(self.places[place])} are not finite at d_model {self.widths[width]} after "
                f"{counted(step + 1, 'step')}. Lower the rate with --learning-rate."
            ]
        after = sorted(zip(self.after, self.places, strict=True), key=lambda pair: pair[0].factor)
        growing, falling = ([pair for pair in after if pair[0].direction == sign] for sign in (1, -1))
        ends = f"from d_model {self.widths[0]} to {self.widths[-1]}"
        if not growing and not falling:
            most = max((found.factor for found, _ in after), key=lambda factor: abs(math.log(factor)))
            return [
                f"{self._behind.capitalize()} every activation has changed about equally at every width {ends}; the "
                f"factor for each doubling that is farthest from 1 is {most:.2f}. A learning rate tuned at one of "
                "these widths fits the others."
            ]
        found, name = growing[-1] if growing else falling[0]
        verb, effect = ("grows", "high") if growing else ("falls", "low")
        transfer = f"A learning rate tuned at one width is too {effect} for a wider network."
        remedy = f"Set model.initialization=mup and model.mup_base_d_model={self.widths[0]}"
        verdict = f"This parametrisation is not muP. {transfer} {remedy}, or tune the rate at each width."
        if self.is_mup:
            reason = "although its initialization is mup: the rate may be too high, or a part may have no rule"
            verdict = f"This network does not train like muP, {reason}. {transfer}"
        return [
            f"The change of the {named(name)} {self._behind} {verb} by a factor of {found.factor:.2f} "
            f"({found.low:.2f} to {found.high:.2f}) for each doubling of the width {ends}. "
            f"Of {counted(len(after), 'place')}, {len(growing)} grow and {len(falling)} fall.",
            verdict,
        ]

    def numbers(self) -> dict[str, Any]:
        """The sizes and changes of every place, and their growth."""
        places = [
            {
                "place": named(name),
                "probe": name,
                "sizes": self.sizes[number].tolist(),
                "changes": self.changes[:, number].tolist(),
                "at_start": vars(start),
                "after": {**vars(after), "direction": after.direction},
            }
            for number, (name, start, after) in enumerate(zip(self.places, self.at_start, self.after, strict=True))
        ]
        return {"widths": list(self.widths), "learning_rate": self.rate, "is_mup": self.is_mup, "places": places}

    def pictures(self) -> Iterator[Picture]:
        """The sizes before the first step, and the changes after each step, over the width."""
        chosen = {"Before the first step": self.sizes}
        for step in dict.fromkeys((0, len(self.changes) - 1)):
            chosen[f"Change after {counted(step + 1, 'step')}"] = self.changes[step]
        figure = bare_figure(3.6 * len(chosen) + 0.6, 3.8)
        figure.set_layout_engine("constrained")
        colours = dict(zip(_PLACES, _COLOURS, strict=True))
        for axes, (title, sizes) in zip(figure.subplots(1, len(chosen)), chosen.items(), strict=True):
            for place, row in zip(self.places, sizes.tolist(), strict=True):
                kind = str(_kind(place))
                axes.plot(self.widths, row, color=colours[kind], marker="o", markersize=3, label=_PLACES[kind])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(xlabel="d_model", ylabel="Root mean square", xscale="log", yscale="log")
            axes.set_xticks(self.widths, [str(width) for width in self.widths])
            axes.minorticks_off()
            plain(axes)
        lines = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        yield Picture("coordinates", figure, {})


def named(place: str) -> str:
    """A place in words: ``attention output of block 2``."""
    words, inside = _PLACES[str(_kind(place))], place.partition("blocks.")[2]
    return f"{words} of block {inside.partition('.')[0]}" if inside else words


def coordinates(
    widths: Sequence[int],
    trial: Callable[[int], Iterable[Activations]],
    *,
    rate: float,
    is_mup: bool,
    notes: Sequence[str] = (),
) -> Coordinates:
    """Compares networks of some `widths`; `trial` yields the activations of one before its first and after each step.

    Raises `UsageError` for fewer than three different widths.
    """
    widths = tuple(sorted(set(widths)))
    if len(widths) < FEWEST_WIDTHS:
        raise UsageError(f"A line over the width needs at least {FEWEST_WIDTHS} widths, not {len(widths)}. Give more.")
    sizes, changes, places = [], [], tuple[str, ...]()
    for width in widths:
        first: Activations = {}
        moved = []
        for found in trial(width):
            if not first:
                first, places = found, tuple(found)
                sizes.append([_size(value[value.isfinite()]) for value in first.values()])
            else:
                moved.append([_size((found[name] - value)[value.isfinite()]) for name, value in first.items()])
        changes.append(moved)
    return Coordinates(
        tuple(notes), widths, places, torch.tensor(sizes).T, torch.tensor(changes).permute(1, 2, 0), rate, is_mup
    )


def _size(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
