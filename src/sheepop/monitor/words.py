"""Texts as vectors of their words, and the words that tell one group of texts from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sheepop.data.duplicates.shingles import shingles_of_words, spelled_words, word_hashes
from sheepop.evaluate.statistics import Floats

_DIMENSIONS = 2048
_STRENGTH = 10.0  # of the prior, in texts
_CERTAIN = 2.5  # standard errors; many words are compared


def word_vectors(texts: Sequence[str], count: int = 1) -> Floats:
    """The runs of `count` words of each text as a vector of length 1, shape (texts, 2048).

    A run is hashed to a dimension (Weinberger et al. 2009), and counts as the square root of how often it occurs.
    """
    found = np.zeros((len(texts), _DIMENSIONS))
    for row, text in zip(found, texts, strict=True):
        places = shingles_of_words(word_hashes(text, "prose"), "prose", count) % np.uint64(_DIMENSIONS)
        row[:] = np.sqrt(np.bincount(places.astype(np.int64), minlength=_DIMENSIONS))
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def telling_words(texts: Sequence[str], others: Sequence[str], most: int = 6) -> list[str]:
    """The words that more of `texts` than of `others` have, the most certain first.

    They are ordered by the z score of their log odds ratio with a prior of both groups' words (Monroe, Colaresi and
    Quinn 2008, equations 15 to 22), where a text counts a word once.
    """
    ours, theirs = (Counter(word for text in group for word in set(spelled_words(text))) for group in (texts, others))
    both, size = ours + theirs, len(texts) + len(others)
    scores = {}
    for word, count in ours.items():
        prior = _STRENGTH * both[word] / size
        odds = [
            np.log((found + prior) / (total - found + _STRENGTH - prior + 0.5))
            for found, total in ((count, len(texts)), (theirs[word], len(others)))
        ]
        spread = 1 / (count + prior) + 1 / (theirs[word] + prior)
        scores[word] = float((odds[0] - odds[1]) / np.sqrt(spread))
    certain = [word for word, score in scores.items() if score > _CERTAIN and ours[word] > 1]
    return sorted(certain, key=lambda word: (-scores[word], word))[:most]
