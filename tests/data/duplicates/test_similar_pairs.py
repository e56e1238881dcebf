from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import NEIGHBOURS, REPRESENTATIVES, UNRANKED, Ranking, similar_pairs
from sheepop.data.duplicates.signatures import PartSignatures, document_signature

CONFIG = NearDuplicatesConfig(threshold=0.3, bands=26, rows=2)
Sign = Callable[..., list[PartSignatures]]


def found_pairs(
    parts: list[PartSignatures], directory: Path, threshold: float, memory_bytes: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """The pairs, as ordinals, and the ordinals in the order of preference."""
    ranking = Ranking(parts, None, directory, memory_bytes=memory_bytes)
    with similar_pairs(parts, ranking, threshold, directory, memory_bytes=memory_bytes) as pairs:
        ordinals = ranking.ordinals.tolist()
        rows = [tuple(row) for block in pairs.blocks() for row in block.tolist()]
        assert rows == sorted(set(rows))
        return [(ordinals[worse], ordinals[better]) for worse, better in rows], ordinals


@pytest.mark.parametrize("memory_bytes", [1, 2**24])
def test_documents_that_agree_in_a_band_are_candidates(
    tmp_path: Path, sign: Sign, maker: Callable[[int], Any], memory_bytes: int
) -> None:
    make = maker(3)
    originals = [make.prose(60) for _ in range(12)]
    texts = [" ".join(make.edited(words, 0.6)) for words in originals for _ in range(8)] + ["", "?", "one two"]
    make.random.shuffle(texts)
    documents = [Document.of(text, "file", number) for number, text in enumerate(texts)]
    parts = sign([documents[:40], documents[40:40], documents[40:]], CONFIG)
    found, preferred = found_pairs(parts, tmp_path / "work", 0.3, memory_bytes)

    signatures = [document_signature(text, "prose", CONFIG) for text in texts]
    expected = set()
    for first, second in combinations([n for n, signature in enumerate(signatures) if signature.num_shingles], 2):
        sizes = sorted((signatures[first].num_shingles, signatures[second].num_shingles))
        if np.any(signatures[first].bands == signatures[second].bands) and sizes[0] / sizes[1] >= 0.3:
            shorter_or_later = max(first, second, key=lambda n: (-documents[n].num_bytes, n))
            expected.add((shorter_or_later, first + second - shorter_or_later))
    assert set(found) == expected and len(expected) > 200
    compared = [n for n, signature in enumerate(signatures) if signature.num_shingles]
    assert preferred == sorted(compared, key=lambda n: (-documents[n].num_bytes, n))


@pytest.mark.parametrize("memory_bytes", [2**12, 2**24])
@pytest.mark.parametrize("size", [1, 33, 34, 90])
def test_the_pairs_of_a_crowded_bucket_grow_with_its_size(
    tmp_path: Path, sign: Sign, size: int, memory_bytes: int
) -> None:
    words = "all of these documents have the same words in the same order "
    texts = [words * 3 + "." * number for number in range(size)]
    documents = [Document.of(text, "file", number) for number, text in enumerate(texts)]
    parts = sign([documents], NearDuplicatesConfig(threshold=0.3, bands=7, rows=1))
    found, preferred = found_pairs(parts, tmp_path / "work", 0.3, memory_bytes)
    assert preferred == list(range(size))[::-1]
    by_worse = defaultdict(set)
    for worse, better in found:
        by_worse[preferred.index(worse)].add(preferred.index(better))
    for place in range(size):
        best, nearest = range(min(REPRESENTATIVES, place)), range(max(0, place - NEIGHBOURS), place)
        assert by_worse[place] == {*best, *nearest}


def test_protected_documents_are_best_and_not_compared_with_each_other(tmp_path: Path, sign: Sign) -> None:
    text = "a few words that all of these documents have in common, and then "
    earlier = [Document.of(text + end, "old", 0) for end in ("", "x")]
    new = [Document.of(text + "a longer end" + end, "new", 0) for end in ("", "x")]
    parts = sign([earlier, new], CONFIG, protected=1)
    found, preferred = found_pairs(parts, tmp_path / "work", 0.3, 2**20)
    assert preferred == [0, 1, 3, 2]
    assert set(found) == {(3, 0), (3, 1), (2, 0), (2, 1), (2, 3)}


def test_documents_that_are_left_out_have_no_rank(tmp_path: Path, sign: Sign) -> None:
    documents = [Document.of(text, "file", 0) for text in ("one two three", "??", "one two three four")]
    parts = sign([documents], CONFIG)
    ranking = Ranking(parts, None, tmp_path / "work", memory_bytes=1)
    assert ranking.ranks.tolist() == [1, int(UNRANKED), 0]
    assert ranking.ordinals.tolist() == [2, 0]
