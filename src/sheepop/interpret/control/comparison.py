"""What changed between two models, or two checkpoints: the gains of blocks, and influences on the last token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line
from sheepop.interpret.control.drawing import lines_by_layer
from sheepop.interpret.control.finding import PromptFinding, columns
from sheepop.interpret.control.gains import Gain, gain_of
from sheepop.interpret.control.influence import influences
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture

_STEPS = 16
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class GainChanges(PromptFinding):
    """The gains of the blocks of two models, `first` and `second`, and of all blocks together, which come last.

    `influence` (2, T) are the influences of every token on the last state in both, and `error` (2, T) half their
    intervals, relative to them.
    """

    verb: ClassVar[str] = "compare"
    first: tuple[Gain, ...]
    second: tuple[Gain, ...]
    influence: Tensor
    error: Tensor

    @property
    def names(self) -> list[str]:
        """The names of what has gains."""
        return [*(f"block {layer}" for layer in range(len(self.first) - 1)), "all blocks"]

    def is_clear(self, token: int) -> bool:
        """Whether the intervals of a token's two influences do not overlap."""
        before, after = self.influence[:, token].tolist()
        margins = (self.influence[:, token] * self.error[:, token]).tolist()
        return abs(after - before) > sum(margins)

    def table(self) -> list[str]:
        """The gains of both models, and the influences that changed most."""
        rows = [
            [name, f"{a.largest:.3f}", f"{b.largest:.3f}", f"{a.typical.value:.3f}", f"{b.typical.value:.3f}"]
            for name, a, b in zip(self.names, self.first, self.second, strict=True)
        ]
        ratio = (self.influence[1] / self.influence[0]).log().abs().nan_to_num(0.0)
        changed = [
            [
                visible_line(self.tokens[token]),
                str(token),
                *(f"{value:.3g} (±{error:.0%})" for value, error in zip(*self._of(token), strict=True)),
                "yes" if self.is_clear(token) else "no",
            ]
            for token in ratio.argsort(descending=True)[:_SHOWN].tolist()
        ]
        return [
            *columns(["gain", "largest", "then", "typical", "then"], rows),
            "",
            "Influence on the last state:",
            *columns(["token", "position", "first", "second", "beyond the error"], changed),
        ]

    def _of(self, token: int) -> tuple[list[float], list[float]]:
        return self.influence[:, token].tolist(), self.error[:, token].tolist()

    def sentences(self) -> list[str]:
        """The gain and the number of influences that changed."""
        pairs = list(zip(self.names, self.first, self.second, strict=True))
        name, a, b = max(pairs[:-1], key=lambda pair: abs(pair[2].largest - pair[1].largest) / pair[1].largest)
        clear = sum(self.is_clear(token) for token in range(len(self.tokens)))
        return [
            f"The largest gain that changed most is that of {name}, from {a.largest:.4g} to {b.largest:.4g} "
            f"({b.largest / a.largest - 1:+.1%}).",
            f"The influence of {clear} of {counted(len(self.tokens), 'token')} on the last state changed by more than "
            "the error of the estimates.",
        ]

    def pictures(self) -> Iterator[Picture]:
        """The gains of the blocks of both models."""
        lines = {
            f"{kind}, {name} model": [gain.largest if kind == "Largest" else gain.typical.value for gain in gains[:-1]]
            for kind in ("Largest", "Typical")
            for name, gains in (("first", self.first), ("second", self.second))
        }
        yield lines_by_layer("compare", "Gain of each block", lines, "Gain")


def compare_points(first: OperatingPoint, second: OperatingPoint, *, probes: int = 8, seed: int = 0) -> GainChanges:
    """Compares two models at the same prompt, with the same random directions.

    Raises `UsageError` if they read other tokens, or do not have as many blocks of the same width.
    """
    if first.trace.token_ids != second.trace.token_ids:
        raise UsageError("The two models split the prompt into other tokens. Compare models with the same tokenizer.")
    if first.states.shape != second.states.shape:
        shapes = [f"{point.num_layers} blocks of width {point.model.config.d_model}" for point in (first, second)]
        raise UsageError(f"The first model has {shapes[0]}, the second {shapes[1]}. Compare models of one shape.")
    ends = [(layer, layer + 1) for layer in range(first.num_layers)] + [(0, first.num_layers)]
    gains = [
        tuple(gain_of("gain", point.between(*pair), _STEPS, probes, seed) for pair in ends) for point in (first, second)
    ]
    last = [first.num_tokens - 1]
    reached = [influences(point.between(0, first.num_layers), probes, seed, last) for point in (first, second)]
    values, errors = (torch.cat(list(each)) for each in zip(*reached, strict=True))
    notes = [note for note in first.notes if note in second.notes]
    for name, own, others in (("first", first.notes, second.notes), ("second", second.notes, first.notes)):
        notes += [f"The {name} model: {note}" for note in own if note not in others]
    return GainChanges(tuple(notes), first.tokens, gains[0], gains[1], values, errors)
