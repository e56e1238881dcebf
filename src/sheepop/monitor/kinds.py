"""The kinds of prompts that users ask, and which of them get more bad votes than the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.random import numpy_generator
from sheepop.evaluate.statistics import Floats
from sheepop.monitor.answered import Answered
from sheepop.monitor.figures import Share
from sheepop.monitor.words import telling_words, word_vectors

FEWEST_VOTED = 20
_MOST_VOTED = 2000
_MOST_KINDS = 12
_DIRECTIONS = 16
_STARTS = 10
_EXAMPLES = 3
_LEVEL = 0.05


@dataclass(frozen=True)
class Kind:
    """Prompts with similar words: the words that tell them from the others, the share of bad votes, and examples.

    `p` is the chance of as many bad votes if this kind were like the others (Fisher's exact test), times the number of
    kinds that it was compared with in Holm's order (1979). `examples` are the prompts in the middle of the kind.
    """

    words: list[str]
    bad: Share
    p: float
    examples: list[str]

    @property
    def is_worse(self) -> bool:
        """Whether the kind gets more bad votes than the others for certain."""
        return self.p < _LEVEL

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data."""
        return asdict(self) | {"is_worse": self.is_worse}


def kinds(answers: Sequence[Answered], seed: int = 0) -> list[Kind]:
    """The kinds of prompts of the answers with votes, the worst first; none for fewer than 20.

    They are clusters of the main directions of their words, the best of ten by k-means (Lloyd 1982).
    """
    from scipy.cluster.vq import kmeans, vq  # loads slowly

    voted = [each for each in answers if each.votes and each.asked.strip()]
    if len(voted) < FEWEST_VOTED:
        return []
    draw = numpy_generator(seed, "kinds of prompts")
    voted = [voted[place] for place in sorted(draw.permutation(len(voted))[:_MOST_VOTED])]
    prompts, is_bad = np.array([each.asked for each in voted], object), np.array([each.votes < 0 for each in voted])
    points = main_directions(word_vectors(prompts.tolist()), _DIRECTIONS)
    count = min(_MOST_KINDS, max(2, round(math.cbrt(len(voted)))))
    centers, _ = kmeans(points, count, iter=_STARTS, seed=draw)
    labels, distances = vq(points, centers)
    found = []
    for label in np.unique(labels):
        inside = labels == label
        nearest = list(dict.fromkeys(prompts[inside][np.argsort(distances[inside], kind="stable")]))
        bad = Share.of(is_bad[inside].tolist())
        assert bad is not None
        words = telling_words(prompts[inside].tolist(), prompts[~inside].tolist())
        found.append(Kind(words, bad, _chance_of_more(is_bad, inside), nearest[:_EXAMPLES]))
    return _corrected(found)


def main_directions(vectors: Floats, most: int) -> Floats:
    """The vectors (N, D) in their `most` main directions, each scaled to length 1 (Deerwester et al. 1990).

    Dimensions that many vectors have count less, by the logarithm of their share.
    """
    shares = (vectors > 0).mean(0)
    weighted = vectors * np.log(1 / np.maximum(shares, 1 / len(vectors)))
    values, basis = np.linalg.eigh(weighted @ weighted.T)
    points = basis[:, -most:] * np.sqrt(np.maximum(values[-most:], 0))
    return np.asarray(points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12))


def _chance_of_more(is_bad: NDArray[np.bool_], inside: NDArray[np.bool_]) -> float:
    """The chance of at least as many bad ones among those `inside`, if these were drawn from all (Fisher 1935)."""
    from scipy.stats import hypergeom  # loads slowly

    return float(hypergeom.sf((is_bad & inside).sum() - 1, len(is_bad), is_bad.sum(), inside.sum()))


def _corrected(found: list[Kind]) -> list[Kind]:
    """The kinds with p values for all of these tests together, the worst first."""
    ordered = sorted(found, key=lambda kind: (kind.p, -kind.bad.value))
    scaled = [min(1.0, kind.p * (len(ordered) - place)) for place, kind in enumerate(ordered)]
    return [replace(kind, p=p) for kind, p in zip(ordered, accumulate(scaled, max), strict=True)]
