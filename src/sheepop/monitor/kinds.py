"""The kinds of prompts that users ask, and which of them get more bad votes than the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
_STARTS, _ROUNDS = 10, 100
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
        """All as plain data."""
        return asdict(self) | {"is_worse": self.is_worse}


def kinds(answers: Sequence[Answered], seed: int = 0) -> list[Kind]:
    """The kinds of prompts of the answers with votes, the worst first; none for fewer than 20."""
    voted = [each for each in answers if each.votes and each.asked.strip()]
    if len(voted) < FEWEST_VOTED:
        return []
    draw = numpy_generator(seed, "kinds of prompts")
    voted = [voted[place] for place in sorted(draw.permutation(len(voted))[:_MOST_VOTED])]
    prompts, is_bad = [each.asked for each in voted], np.array([each.votes < 0 for each in voted])
    points = main_directions(word_vectors(prompts), _DIRECTIONS)
    count = min(_MOST_KINDS, max(2, round(math.cbrt(len(voted)))))
    labels, centers = _clusters(points, count, draw)
    found = []
    for label in np.unique(labels):
        inside = labels == label
        ours = [prompt for prompt, own in zip(prompts, inside, strict=True) if own]
        others = [prompt for prompt, own in zip(prompts, inside, strict=True) if not own]
        distances = ((points[inside] - centers[label]) ** 2).sum(1)
        nearest = list(dict.fromkeys(ours[place] for place in np.argsort(distances, kind="stable")))
        bad = Share.of(is_bad[inside].tolist())
        assert bad is not None
        p = _chance_of_more(int(is_bad[inside].sum()), len(ours), int(is_bad.sum()), len(voted))
        found.append(Kind(telling_words(ours, others), bad, p, nearest[:_EXAMPLES]))
    return _corrected(found)


def main_directions(vectors: Floats, most: int) -> Floats:
    """The vectors (N, D) in their `most` main directions, each scaled to length 1 (Deerwester et al. 1990).

    Dimensions that many vectors have count less, by the logarithm of their share.
    """
    shares = (vectors > 0).mean(0)
    weighted = (vectors * np.log(1 / np.maximum(shares, 1 / len(vectors)))).astype(np.float64)
    values, basis = np.linalg.eigh(weighted @ weighted.T)
    points = basis[:, -most:] * np.sqrt(np.maximum(values[-most:], 0))
    return np.asarray(points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12))


def _clusters(points: Floats, count: int, draw: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
    """The cluster of each point and the centers: by scikit-learn if it is installed, else by `k_means`."""
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        return k_means(points, count, draw)
    found = KMeans(count, n_init=_STARTS, random_state=int(draw.integers(2**31))).fit(points)
    return found.labels_.astype(np.int64), found.cluster_centers_


def k_means(points: Floats, count: int, draw: np.random.Generator) -> tuple[NDArray[np.int64], Floats]:
    """The best of ten clusterings by Lloyd's algorithm (1982) with the starts of Arthur and Vassilvitskii (2007)."""
    best, found = math.inf, (np.zeros(len(points), np.int64), points[:1])
    for _ in range(_STARTS):
        centers = points[draw.integers(len(points), size=1)]
        while len(centers) < count:
            far = _distances(points, centers).min(1)
            chances = far / far.sum() if far.sum() > 0 else None
            centers = np.vstack([centers, points[draw.choice(len(points), p=chances)]])
        for _ in range(_ROUNDS):
            labels = _distances(points, centers).argmin(1)
            moved = np.stack(
                [
                    points[labels == label].mean(0) if (labels == label).any() else centers[label]
                    for label in range(count)
                ]
            )
            if np.array_equal(moved, centers):
                break
            centers = moved
        distances = _distances(points, centers)
        if (spread := float(distances.min(1).sum())) < best:
            best, found = spread, (distances.argmin(1), centers)
    return found


def _distances(points: Floats, centers: Floats) -> Floats:
    """The squared distance of each point from each center, shape (points, centers)."""
    squares = (points**2).sum(1)[:, None] + (centers**2).sum(1) - 2 * points @ centers.T
    return np.maximum(squares, 0)


def _chance_of_more(bad: int, count: int, all_bad: int, total: int) -> float:
    """The chance of at least `bad` bad ones among `count` that are drawn from `total` with `all_bad` bad ones."""
    ways = sum(
        math.comb(all_bad, number) * math.comb(total - all_bad, count - number)
        for number in range(bad, min(count, all_bad) + 1)
        if count - number <= total - all_bad
    )
    return ways / math.comb(total, count)


def _corrected(found: list[Kind]) -> list[Kind]:
    """The kinds with p values for all of these tests together, the worst first."""
    ordered = sorted(found, key=lambda kind: (kind.p, -kind.bad.value))
    highest, corrected = 0.0, []
    for place, kind in enumerate(ordered):
        highest = max(highest, min(1.0, kind.p * (len(ordered) - place)))
        corrected.append(Kind(kind.words, kind.bad, highest, kind.examples))
    return corrected
