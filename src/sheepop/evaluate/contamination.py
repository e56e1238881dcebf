"""Contamination: items that share 13 consecutive words with the training text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from sheepop.data.clean.decontamination import hashed_words
from sheepop.data.duplicates.shingles import Hashes, shingles_of_words
from sheepop.evaluate.results import Evaluation, Table, mean_of

NGRAM = 13
_FEWEST_WORDS = 8
_RULE = "prose"


def shares_in_training(texts: Mapping[str, str], training: Iterable[str], ngram: int = NGRAM) -> dict[str, float]:
    """The share of each text's word n-grams that occur in a training text, by the id of the text.

    Words are runs of letters and digits in lower case, so case, punctuation and line breaks do not matter (after Brown
    et al. 2020, appendix C). A text of fewer than `ngram` words is one n-gram of all its words; a text of fewer than
    eight words is left out, because it may occur anywhere by chance.
    """
    grams: dict[str, Hashes] = {}
    lengths: dict[str, int] = {}
    for name, text in texts.items():
        hashes = hashed_words(text)
        if hashes.size >= min(_FEWEST_WORDS, ngram):
            lengths[name] = min(ngram, hashes.size)
            grams[name] = shingles_of_words(hashes, _RULE, lengths[name])
    wanted = {
        length: np.unique(np.concatenate([grams[name] for name in grams if lengths[name] == length]))
        for length in set(lengths.values())
    }
    seen = {length: np.zeros(hashes.size, bool) for length, hashes in wanted.items()}
    for text in training:
        hashes = hashed_words(text)
        for length, known in wanted.items():
            if hashes.size >= length:
                there = np.searchsorted(known, found := shingles_of_words(hashes, _RULE, length))
                there[there == known.size] = 0
                seen[length][there[known[there] == found]] = True
    return {
        name: float(seen[lengths[name]][np.searchsorted(wanted[lengths[name]], found)].mean())
        for name, found in grams.items()
    }


def with_contamination(evaluation: Evaluation, shares: Mapping[str, float], training: str) -> Evaluation:
    """`evaluation` with a table of its scores on items that overlap with the training text and on the others."""
    items = [item for item in evaluation.items if item.id in shares]
    parts = {
        "clean: nothing of it is in the training text": [item for item in items if shares[item.id] == 0],
        f"dirty: {NGRAM} words in a row or more are": [item for item in items if shares[item.id] > 0],
    }
    names = [measure.name for measure in evaluation.measures if any(measure.name in item.values for item in items)]
    rows = [
        [label, len(found), len(found) / max(1, len(items)), *(mean_of(found, name) for name in names)]
        for label, found in parts.items()
    ]
    table = Table(f"Contamination by {training}", ("Items", "Number", "Share", *names), rows)
    return replace(evaluation, tables=[*evaluation.tables, table])
