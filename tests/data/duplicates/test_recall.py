"""How many near duplicates are found, and whether anything else goes: measured on documents of known similarity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig, share_found
from sheepop.data.duplicates.search import Ranking, Removed, similar_pairs
from sheepop.data.duplicates.signatures import PartSignatures

CONFIG = NearDuplicatesConfig()
LEVELS = [0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
PAIRS = 40


@dataclass
class Pair:
    """Two documents at the ordinals 2 n and 2 n + 1, alike to each other and to no other document."""

    kind: str
    level: float
    similarity: float
    candidate: bool = False
    removed: bool = False


@dataclass
class Measured:
    """The pairs, and removals that are not of a pair."""

    pairs: list[Pair]
    removed: list[Removed]


@pytest.fixture(scope="module")
def pairs_and_documents(slow: Any, maker: Callable[[int], Any]) -> tuple[list[Pair], list[Document]]:
    make = maker(2024)
    pairs, documents = [], []
    for kind in ("prose", "code"):
        for level in LEVELS:
            for _ in range(PAIRS):
                words = getattr(make, kind)(make.random.randint(80, 160))
                texts = [" ".join(words), " ".join(make.edited(words, level))]
                pairs.append(Pair(kind, level, slow.jaccard(*((text, kind) for text in texts))))
                documents += [Document.of(text, "file", len(documents), kind=kind) for text in texts]
    return pairs, documents


@pytest.fixture
def measured(
    pairs_and_documents: tuple[list[Pair], list[Document]],
    tmp_path: Path,
    sign: Callable[..., list[PartSignatures]],
    decide: Callable[..., list[Removed]],
) -> Measured:
    pairs, documents = pairs_and_documents
    [part] = sign([documents], CONFIG)
    ranking = Ranking([part], None, tmp_path, memory_bytes=2**24)
    with similar_pairs([part], ranking, 0.0, tmp_path, memory_bytes=2**24) as candidates:
        for rows in candidates.blocks():
            for first, second in ranking.ordinals[rows].tolist():
                if first // 2 == second // 2:
                    pairs[first // 2].candidate = True
    removed = decide([documents], CONFIG)
    for item in removed:
        pairs[item.index // 2].removed = True
    return Measured(pairs, removed)


def test_near_duplicates_are_found_as_often_as_theory_says_and_nothing_else_goes(measured: Measured) -> None:
    threshold = CONFIG.threshold
    print(f"\n{'kind':6} {'J':>5} {'pairs':>6} {'candidates':>11} {'theory':>7} {'J >= 0.8':>9} {'removed':>8}")
    for kind in ("prose", "code"):
        for level in LEVELS:
            pairs = [pair for pair in measured.pairs if (pair.kind, pair.level) == (kind, level)]
            shares = [share_found(pair.similarity, CONFIG.bands, CONFIG.rows) for pair in pairs]
            found, expected = sum(pair.candidate for pair in pairs), sum(shares)
            similar = [pair for pair in pairs if pair.similarity >= threshold]
            removed = sum(pair.removed for pair in similar)
            print(
                f"{kind:6} {sum(pair.similarity for pair in pairs) / len(pairs):5.3f} {len(pairs):6} "
                f"{found / len(pairs):11.3f} {expected / len(pairs):7.3f} {len(similar):9} {removed:8}"
            )
            # The pairs are independent, each found with its own probability.
            deviation = sum(share * (1 - share) for share in shares) ** 0.5
            assert abs(found - expected) <= 4 * deviation + 0.5
            if level >= 0.9:
                assert removed >= 0.95 * len(similar) and len(similar) > PAIRS / 2
            # What is found and similar enough goes, exactly that.
            assert all(pair.removed == (pair.candidate and pair.similarity >= threshold) for pair in pairs)


def test_every_removal_is_of_a_pair_and_names_its_true_similarity(measured: Measured) -> None:
    assert len(measured.removed) == sum(pair.removed for pair in measured.pairs) > 150
    for item in measured.removed:
        assert item.index // 2 == item.kept_index // 2
        assert item.similarity == measured.pairs[item.index // 2].similarity >= CONFIG.threshold


def test_a_crowd_of_likenesses_is_thinned_nearly_as_if_all_pairs_were_compared(
    slow: Any, maker: Callable[[int], Any], decide: Callable[..., list[Removed]]
) -> None:
    """Pages of one template: buckets hold hundreds of documents, of which most pairs are never compared."""
    make = maker(7)
    template, stories = make.prose(100), [make.prose(60) for _ in range(6)]
    documents = []
    for number in range(320):
        words = template + make.edited(stories[number % 6], 0.6)
        documents.append(Document.of(" ".join(words), "file", number))
    removed = decide([documents], CONFIG)
    expected = slow.duplicates(documents, CONFIG)
    print(f"\n{len(documents)} documents: {len(expected)} would go after comparing all pairs, {len(removed)} went")
    assert 60 < len(expected) < 260
    assert len(removed) >= 0.95 * len(expected)
    for item in removed:
        pair = ((documents[number].text, "prose") for number in (item.index, item.kept_index))
        assert slow.jaccard(*pair) == item.similarity >= CONFIG.threshold
    assert not {item.index for item in removed} & {item.kept_index for item in removed if item.reason == "near"}
