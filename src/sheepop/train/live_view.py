"""The live view of a run: its metrics, memory, remaining time, scores and samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
import torch

from sheepop.core.console import Progress
from sheepop.core.facts import Fact, Text
from sheepop.report import MISSING, data_size, duration, flops, scored, shown

# The score shown with the loss of a validation: the first of these that it has.
_SCORES = ("bits_per_byte", "reward", "accuracy")
# Printed once, above a panel, which would cut it.
LEGEND = (
    "loss: surprise per token; perplexity: number of equally likely tokens; bits per byte: surprise per byte; "
    "learning rate: size of a step; gradient norm: pull on the weights; MFU: share of the peak; docs/glossary.md"
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


@dataclass
class LiveView:
    """Turns the rows of a run into the text after a progress bar and the panel below it.

    The metrics ``mfu`` and ``mfu_nominal`` are shares of `peak_flops`, measured in `precision`, and of `nominal_flops`.
    `done` steps were taken before this session. `best` is the lowest held-out loss so far and its step, including
    earlier sessions; `is_sampled` means that it covers only a part of the held-out split.
    """

    progress: Progress
    total_steps: int
    done: int
    device: str
    precision: str
    peak_flops: float
    nominal_flops: float | None = None
    best: tuple[float, int] | None = None
    is_sampled: bool = False
    clock: Callable[[], float] = time.monotonic
    _train: Mapping[str, Any] = field(default_factory=dict)
    _validation: Mapping[str, Any] = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list)
    _samples: list[Mapping[str, Any]] = field(default_factory=list)  # the first and the last of this session
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of metrics."""
        if row["split"] == "train":
            self._train = row
            self._losses.append(row["loss"])
        elif row["split"] == "validation":
            self._validation = row
            if row["loss"] < (math.inf if self.best is None else self.best[0]):
                self.best = row["loss"], row["step"]
        self._show()

    def sampled(self, row: Mapping[str, Any]) -> None:
        """Shows a sample."""
        self._samples = [*self._samples[:1], row]
        self._show()

    def _show(self) -> None:
        row = self._train
        if row:
            memory = data_size(memory_in_use(self.device)[1])
            self.progress.describe(
                f"loss {row['loss']:.3f}  lr {row['learning_rate']:.2e}  norm {row['grad_norm']:.2f}  "
                f"{row['tokens_per_second']:,.0f} tokens/s  {row['mfu']:.0%} MFU  {memory}"
            )
        self.progress.show(self.facts())

    def facts(self) -> list[Fact | Text]:
        """The facts of the panel, in the order in which it shows them."""
        row = self._train
        step = row.get("step", self.done)
        kind, memory = memory_in_use(self.device)
        facts: list[Fact | Text] = [
            Fact("Step", f"{step:,} of {self.total_steps:,}"),
            Fact("Loss", _number(row.get("loss"), ".4f")),
            Fact("Gradient norm", _number(row.get("grad_norm"), ".3f")),
            Fact("Learning rate", _number(row.get("learning_rate"), ".2e")),
            Fact("Tokens/s", _number(row.get("tokens_per_second"), ",.0f")),
            Fact(kind, data_size(memory)),
            Fact("Tokens", shown(row.get("tokens"))),
            Fact("Time left", duration(self._seconds_left(step))),
            Fact("Loss so far", curve(self._losses, _CURVE_WIDTH), wide=True),
            Fact("MFU", self._shares(row), wide=True),
        ]
        if self._validation:
            facts.append(Fact("Held out", self._scores(), wide=True))
        facts += [Text(f"Step {row['step']:,}", f"{row['prompt']}{row['text']}") for row in self._samples]
        return facts

    def _shares(self, row: Mapping[str, Any]) -> str:
        """The shares of the peak speeds that training reaches, beside these peaks."""
        measured = f"{flops(self.peak_flops)}, the matrix peak measured in {self.precision}"
        words = f"{_number(row.get('mfu'), '.1%')} of {measured}"
        if self.nominal_flops is None:
            return words
        return f"{words}; {_number(row.get('mfu_nominal'), '.1%')} of the nominal {flops(self.nominal_flops)}"

    def _scores(self) -> str:
        last = self._validation
        words = f"step {last['step']:,}: loss {last['loss']:.4f}"
        name = next((name for name in _SCORES if name in last), None)
        if name is not None:
            words += f", {last[name]:.4f} {name.replace('_', ' ')}"
        words = scored(words, is_sampled=self.is_sampled)
        if self.best is None:
            return words
        loss, step = self.best
        return f"{words}, the best so far" if step == last["step"] else f"{words} (best {loss:.4f} at step {step:,})"

    def _seconds_left(self, step: int) -> float | None:
        """The remaining seconds, from the mean step of this session including validations and checkpoints."""
        if step <= self.done:
            return None
        return (self.clock() - self._started) / (step - self.done) * (self.total_steps - step)


def memory_in_use(device: str) -> tuple[str, int]:
    """A label and the bytes in use: those of the tensors on a GPU, else those of the process."""
    if device == "cuda":
        return "GPU memory", torch.cuda.memory_allocated()
    if device == "mps":
        return "GPU memory", torch.mps.current_allocated_memory()
    return "Memory", psutil.Process().memory_info().rss


def curve(values: Sequence[float], width: int) -> str:
    """A line chart of at most `width` block characters, each as high as the mean of its share of the values."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return MISSING
    size = min(width, len(found))
    cuts = [len(found) * place // size for place in range(size + 1)]
    means = [sum(found[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None or not math.isfinite(value) else format(value, form)
