from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sheepop.core.errors import DataError
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig, share_found
from sheepop.data.duplicates.shingles import distinct
from sheepop.data.duplicates.signatures import (
    PartSignatures,
    SignatureWriter,
    band_hashes,
    compared_shingles,
    document_signature,
    minima,
)

CONFIG = NearDuplicatesConfig()
Sign = Callable[..., list[PartSignatures]]


@pytest.mark.parametrize("size", [20, 300, 3000])
@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.8, 0.95])
def test_the_share_of_equal_minima_estimates_the_similarity_without_bias(size: int, similarity: float) -> None:
    """The mean of T estimates of P minima has the variance J (1 - J) / (P T)."""
    permutations, repeats = 112, 150
    shared = round(2 * size * similarity / (1 + similarity))
    true = shared / (2 * size - shared)
    values = np.random.default_rng(size).integers(0, 2**64, (repeats, 2 * size - shared), dtype=np.uint64)
    estimates = [
        float(np.mean(minima(row[:size], permutations) == minima(row[size - shared :], permutations))) for row in values
    ]
    deviation = (true * (1 - true) / (permutations * repeats)) ** 0.5
    assert abs(float(np.mean(estimates)) - true) < 4 * deviation
    # Independent permutations: single estimates vary as a binomial share does.
    assert 0.6 < float(np.var(estimates)) / (true * (1 - true) / permutations) < 1.5


def test_minima_are_those_of_a_slow_computation() -> None:
    values = [int.from_bytes(hashlib.blake2b(bytes([i]), digest_size=8).digest(), "big") for i in range(200)]
    factors = minima(np.array([1 << 32], np.uint64), 16).tolist()
    assert all(factor % 2 for factor in factors) and len(set(factors)) == 16
    expected = [min((value >> 32) * factor % 2**32 for value in values) for factor in factors]
    assert minima(np.array(values, np.uint64), 16).tolist() == expected


def test_minima_do_not_depend_on_the_order_or_on_how_many_are_computed_at_once() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 5000, dtype=np.uint64)
    pieces = [minima(values[start : start + 700], 112) for start in range(0, 5000, 700)]
    assert np.array_equal(minima(values[::-1], 112), np.min(pieces, axis=0))


def test_a_band_differs_when_any_of_its_minima_does() -> None:
    least = np.arange(112, dtype=np.uint32)
    bands = band_hashes(least, 16)
    for place in range(112):
        changed = least.copy()
        changed[place] ^= np.uint32(1 << (place % 32))
        different = band_hashes(changed, 16) != bands
        assert different.sum() == 1 and different[place // 7]


def test_a_signature_counts_distinct_shingles(slow: Any, maker: Callable[[int], Any]) -> None:
    make = maker(5)
    for kind, words in (("prose", make.prose(200)), ("code", make.code(200))):
        text = " ".join(words + words[:50])
        expected = len(set(slow.shingle_list(text, kind)))
        assert document_signature(text, kind, CONFIG).num_shingles == expected


def test_a_text_that_is_too_short_is_compared_with_none() -> None:
    config = CONFIG.replace(min_words=4)
    assert document_signature("one two three", "prose", config).num_shingles == 0
    assert document_signature("one two three four", "prose", config).num_shingles == 1
    assert document_signature("?!", "prose", CONFIG).num_shingles == 0
    assert document_signature("", "code", CONFIG).num_shingles == 0


def test_signatures_are_the_same_on_every_machine() -> None:
    """A build that is continued elsewhere compares signatures of both machines."""
    bands = document_signature("The same text gives the same signature in every build.", "prose", CONFIG).bands
    assert bands.dtype == np.uint64 and bands.shape == (16,)
    assert hashlib.blake2b(bands.astype("<u8").tobytes(), digest_size=8).hexdigest() == "5b374a4059ab584f"


def test_distinct_sorts_and_drops_repeats() -> None:
    values = np.array([3, 1, 3, 2**63, 1], np.uint64)
    assert distinct(values).tolist() == [1, 3, 2**63]
    assert distinct(values[:0]).tolist() == []
    assert compared_shingles("a a a a a a a", "prose", CONFIG).size == 1


@pytest.mark.parametrize(("similarity", "published"), [(0.7, 0.56), (0.75, 0.77), (0.8, 0.92), (0.85, 0.988)])
def test_the_share_found_is_that_of_fineweb(similarity: float, published: float) -> None:
    """Penedo et al. 2024, "The FineWeb Datasets", section 3.4: 14 bands of 8 rows."""
    assert share_found(similarity, 14, 8) == pytest.approx(published, abs=0.006)


def test_bands_that_would_miss_what_the_threshold_asks_are_refused_with_better_ones() -> None:
    with pytest.raises(ValueError, match=r"only 11.8% of the pairs .* threshold = 0.5 .* bands = 42 and rows = 3"):
        NearDuplicatesConfig(threshold=0.5)
    assert NearDuplicatesConfig(threshold=0.5, bands=42, rows=3).bands == 42
    for threshold in (0.01, 0.03, 0.1, 0.3, 0.6, 0.7, 0.9, 1.0):
        try:
            NearDuplicatesConfig(threshold=threshold, rows=64, bands=1)
        except ValueError as error:
            bands, rows = (int(part.split(" ")[0].rstrip(",")) for part in str(error).split(" = ")[-2:])
            assert NearDuplicatesConfig(threshold=threshold, bands=bands, rows=rows)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bands": 1000, "rows": 7}, "more than 4096 minima"),
        ({"against": ["a", "a"]}, "is listed twice"),
        ({"against": [" "]}, "empty"),
        ({"threshold": 0}, "greater than 0"),
        ({"threshold": 1.5}, "less than or equal to 1"),
        ({"shingle_words": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NearDuplicatesConfig(**settings)


def test_one_corpus_to_compare_with_may_be_given_as_text() -> None:
    assert NearDuplicatesConfig.model_validate({"against": "corpora/old"}).against == ("corpora/old",)


def documents(count: int) -> list[Document]:
    return [Document.of(f"document {i} has these few words, and é" * (i % 3), "file", i) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 19])
def test_what_was_written_is_read_column_by_column(sign: Sign, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("sheepop.data.duplicates.signatures.BLOCK_DOCUMENTS", 8)
    [part] = sign([documents(count)], CONFIG)
    assert (part.num_documents, part.num_bands, part.protected) == (count, 16, False)
    signatures = [document_signature(document.text, document.kind, CONFIG) for document in documents(count)]

    def column(first: int, last: int) -> list[list[int]]:
        return [row for block in part.blocks(*range(first, last)) for row in block.T.tolist()]

    assert [f"{high:016x}{low:016x}" for high, low in column(0, 2)] == [document.id for document in documents(count)]
    assert column(2, 3) == [[document.num_bytes] for document in documents(count)]
    assert column(3, 4) == [[signature.num_shingles] for signature in signatures]
    assert column(4, 20) == [signature.bands.tolist() for signature in signatures]
    assert column(11, 12) == [[int(signature.bands[7])] for signature in signatures]


def test_without_settings_only_ids_and_lengths_are_written(sign: Sign) -> None:
    [part] = sign([documents(3)], None)
    assert part.num_bands == 0
    assert np.concatenate(list(part.blocks(2, 3)), axis=1).tolist() == [[0, 38, 76], [0, 0, 0]]


def test_a_file_that_an_error_ended_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with pytest.raises(ZeroDivisionError), SignatureWriter(path, CONFIG) as writer:
        writer.add(documents(1)[0])
        raise ZeroDivisionError
    with pytest.raises(DataError, match="is damaged"):
        PartSignatures.open(path, CONFIG)


def test_damage_and_other_settings_are_named(sign: Sign) -> None:
    [part] = sign([documents(5)], CONFIG)
    with pytest.raises(DataError, match=r"00000.signatures has signatures made with other settings"):
        PartSignatures.open(part.path, CONFIG.replace(min_words=3))
    # The threshold decides over signatures, it does not change them.
    assert PartSignatures.open(part.path, CONFIG.replace(threshold=0.9)) == part
    whole = part.path.read_bytes()
    for damaged in (whole[:-8], whole + b"\0", whole[:3], b"", b"x" * len(whole)):
        part.path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged"):
            PartSignatures.open(part.path, CONFIG)
    part.path.write_bytes(whole[:64])
    with pytest.raises(DataError, match="got shorter"):
        list(part.blocks(0, 1))
    part.path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        PartSignatures.open(part.path, CONFIG)
