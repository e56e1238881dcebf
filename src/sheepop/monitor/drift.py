"""Whether prompts are still like the data that a model was trained on, and which ones are not.

A classifier learns from half of the prompts and half of the data, and is tested on the others (Lopez-Paz and Oquab
2017). If both are alike, it can only guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError
from sheepop.core.random import numpy_generator
from sheepop.evaluate.statistics import Floats, probability_above
from sheepop.monitor.figures import Share
from sheepop.monitor.words import telling_words

FEWEST_PROMPTS = 20
_MOST_PROMPTS = 1000
_PER_PROMPT = 3  # pieces of the data, which cost nobody anything
_BLOCK = 10_000  # characters; a block is either learnt from or tested on
_LONGEST_WORD = 20  # characters on average; a script whose spaces are farther apart is written without them
_PENALTIES = 10.0 ** np.arange(-3, 4)
_EXAMPLES = 5


@dataclass(frozen=True)
class Samples:
    """Prompts, and for each of them three pieces of the data as long as it is, to learn from and to test on."""

    learnt: tuple[list[str], list[str]]
    tested: tuple[list[str], list[str]]


@dataclass(frozen=True)
class Drift:
    """How well a classifier tells prompts from data.

    `told` is the probability that it finds a prompt less like the data than a piece of the data is: 0.5 where both are
    alike. `farthest` are the tested prompts that it finds least like the data, and `words` tell prompts from data.
    """

    told: Share
    farthest: list[str]
    words: list[str]

    @property
    def is_certain(self) -> bool:
        """Whether prompts and data differ for certain."""
        return self.told.low > 0.5

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        return asdict(self) | {"is_certain": self.is_certain}


def samples(prompts: Sequence[str], data: Iterable[str], seed: int) -> Samples:
    """Draws prompts, and for each three pieces of the data as long as it is, every character of the data alike.

    What is tested comes from other blocks of the data than what is learnt. Raises `DataError` for too few prompts or
    too little data.
    """
    draw = numpy_generator(seed, "drift")
    given = [prompt for prompt in prompts if prompt.strip()]
    if len(given) < FEWEST_PROMPTS:
        raise DataError(f"The log has {len(given)} prompts. A comparison needs at least {FEWEST_PROMPTS}.")
    drawn = [given[place] for place in draw.permutation(len(given))[:_MOST_PROMPTS]]
    halves = drawn[::2], drawn[1::2]
    lengths = [np.tile([len(prompt.strip()) for prompt in half], _PER_PROMPT) for half in halves]
    typical = float(np.mean(np.concatenate(lengths)))
    pieces, totals = [[""] * len(half) for half in lengths], [0.0, 0.0]
    for number, block in enumerate(_blocks(data)):
        side = number if number < 2 else int(draw.integers(2))  # each half has a block
        weight = max(1.0, len(block) / typical)
        totals[side] += weight
        # A weighted reservoir with a single place, for every piece (Chao 1982).
        places = np.flatnonzero(draw.random(len(lengths[side])) < weight / totals[side])
        bounds = _bounds(block)
        for place in places:
            pieces[side][place] = _piece(block, bounds, int(lengths[side][place]), draw)
    if not all(totals):
        raise DataError("The data to compare with has less than two texts. Give the corpus or the run of the model.")
    return Samples((halves[0], pieces[0]), (halves[1], pieces[1]))


def drift(found: Samples, vectors: Callable[[Sequence[str]], Floats]) -> Drift:
    """Compares prompts and data by their `vectors`, shape (texts, D)."""
    learnt, tested = ([*prompts, *pieces] for prompts, pieces in (found.learnt, found.tested))
    known, asked = vectors(learnt), vectors(tested)
    middle, spread = known.mean(0), np.maximum(known.std(0), 1e-12 + known.std() * 1e-3)
    known, asked = (known - middle) / spread, (asked - middle) / spread
    labels = np.repeat([1.0, -1 / _PER_PROMPT], [len(found.learnt[0]), len(found.learnt[1])])
    scores = asked @ (known.T @ _dual_weights(known @ known.T, labels))
    prompts = found.tested[0]
    value, low, high = probability_above(scores[: len(prompts)], scores[len(prompts) :])
    farthest = list(dict.fromkeys(prompts[place] for place in np.argsort(-scores[: len(prompts)], kind="stable")))
    words = telling_words([*found.learnt[0], *prompts], [*found.learnt[1], *found.tested[1]])
    return Drift(Share(value, low, high, len(prompts)), farthest[:_EXAMPLES], words)


def _dual_weights(kernel: Floats, labels: Floats) -> Floats:
    """The weights of ridge regression on a kernel (N, N), with the penalty of the least error on what is left out.

    The error of leaving out one is in closed form (Rifkin and Lippert 2007, section 2).
    """
    values, basis = np.linalg.eigh(kernel)
    inside = basis.T @ labels
    best, found = np.inf, labels
    for penalty in _PENALTIES * max(float(values.mean()), 1e-12):
        inverse = 1 / (np.maximum(values, 0) + penalty)
        weights = basis @ (inverse * inside)
        error = float(np.mean((weights / ((basis**2) @ inverse)) ** 2))
        if error < best:
            best, found = error, weights
    return found


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), _BLOCK):
            if block := text[begin : begin + _BLOCK].strip():
                yield block


def _bounds(block: str) -> NDArray[np.int64]:
    """The places where words begin, and the end; every place in a script without spaces."""
    found = np.array([0, *(space.end() for space in re.finditer(r"\s+", block)), len(block)])
    return np.arange(len(block) + 1) if len(found) * _LONGEST_WORD < len(block) else found


def _piece(block: str, bounds: NDArray[np.int64], length: int, draw: np.random.Generator) -> str:
    """A piece of a block of about `length` characters between two `bounds`, or the whole block if it is shorter."""
    if len(block) <= length:
        return block
    begins = bounds[bounds <= len(block) - length]
    begin = int(begins[draw.integers(len(begins))])
    after = bounds[bounds > begin]
    return block[begin : int(after[np.abs(after - begin - length).argmin()])].strip()
