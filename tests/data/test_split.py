from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.data.config import SplitMode
from sheepop.data.documents import Document
from sheepop.data.split import Splitter, split_key


class Split(NamedTuple):
    """What a splitter made of documents."""

    splitter: Splitter
    cut_documents: int


def split(
    texts: list[str], fraction: float, mode: SplitMode = "document", seed: int = 0
) -> tuple[dict[str, list[str]], Split]:
    documents = [Document.of(text, f"{i}.txt", 0) for i, text in enumerate(texts)]
    splitter = Splitter(mode, fraction, seed)
    for document in documents:
        splitter.count(document.id, document.num_bytes)
    result: dict[str, list[str]] = {"train": [], "validation": []}
    passed = cut_documents = 0
    for document in documents:
        pieces = splitter.pieces(document.stored(), passed)
        passed += document.num_bytes
        cut_documents += len(pieces) - 1
        for name, stored in pieces:
            piece = stored.document()
            assert piece == Document.of(piece.text, piece.source, piece.part)
            result[name].append(piece.text)
    return result, Split(splitter, cut_documents)


def test_the_key_is_a_hash_of_seed_and_content() -> None:
    # BLAKE2b of the written-out tuple, top bit dropped, as core.random specifies it.
    digest = hashlib.blake2b(b"(7, 'validation split', 'abc')", digest_size=8).digest()
    assert split_key(7, "abc") == (int.from_bytes(digest, "little") >> 1) / 2**63


@given(st.permutations([f"document {i}" for i in range(40)]), st.integers(0, 5))
def test_order_does_not_matter_and_nothing_is_lost(texts: list[str], seed: int) -> None:
    result, done = split(texts, 0.2, seed=seed)
    reference, _ = split(sorted(texts), 0.2, seed=seed)
    assert {name: set(part) for name, part in result.items()} == {name: set(part) for name, part in reference.items()}
    assert result["train"] and result["validation"]
    assert [t for t in texts if t in set(result["train"])] == result["train"]
    assert Counter(result["train"] + result["validation"]) == Counter(texts)
    assert done.splitter.method == "document" and done.cut_documents == 0


def test_the_share_is_about_the_fraction() -> None:
    result, _ = split([f"document {i}" for i in range(5000)], 0.1)
    assert 430 <= len(result["validation"]) <= 570  # five standard deviations of a binomial


def test_other_documents_do_not_change_where_one_goes() -> None:
    texts = [f"document {i}" for i in range(400)]
    some, _ = split(texts[:200], 0.3)
    more, _ = split(texts, 0.3)
    assert set(some["validation"]) <= set(more["validation"])


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_an_empty_side_gets_the_nearest_document(fraction: float) -> None:
    result, done = split([f"document {i}" for i in range(30)], fraction)
    assert min(len(result["train"]), len(result["validation"])) == 1
    assert "so one is " in done.splitter.words


class TestTail:
    def test_few_documents_are_cut_at_a_line_end(self) -> None:
        # 40 bytes; a quarter is 10, so the cut is wanted at 30; line ends are at 4, 12, 24 and 32.
        text = "abc\n" + "defghij\n" + "k" * 11 + "\n" + "l" * 7 + "\n" + "m" * 8
        result, done = split([text], 0.25)
        assert result == {"train": [text[:32]], "validation": [text[32:]]}
        assert done.cut_documents == 1
        assert "fewer than 20 documents (1)" in done.splitter.words

    def test_it_is_contiguous_over_documents(self) -> None:
        texts = ["a\n" * 10, "b\n" * 10, "c\n" * 10]
        result, done = split(texts, 0.5, mode="tail")
        assert result == {"train": ["a\n" * 10, "b\n" * 5], "validation": ["b\n" * 5, "c\n" * 10]}
        assert done.splitter.words.endswith("because data.split is tail.")

    def test_the_boundary_of_a_document_is_a_place_to_cut(self) -> None:
        result, done = split(["one line", "another line"], 0.01)
        assert result == {"train": ["one line"], "validation": ["another line"]}
        assert done.cut_documents == 0

    def test_old_macintosh_line_ends_count(self) -> None:
        result, _ = split(["a\rb\rc\r"], 0.3)
        assert result == {"train": ["a\rb\r"], "validation": ["c\r"]}

    def test_many_documents_are_cut_when_asked(self) -> None:
        texts = [f"{i}\n" for i in range(10, 60)]
        result, _ = split(texts, 0.1, mode="tail")
        assert result == {"train": texts[:45], "validation": texts[45:]}

    def test_one_line_cannot_be_cut(self) -> None:
        with pytest.raises(DataError, match=r"data.validation_fraction=0"):
            split(["no line end here"], 0.5)

    @given(
        st.lists(st.text(st.sampled_from("aé\n"), min_size=1), min_size=1, max_size=19),
        st.floats(0.001, 0.999),
    )
    def test_nothing_is_lost_and_no_side_is_empty(self, texts: list[str], fraction: float) -> None:
        try:
            result, done = split(texts, fraction)
        except DataError:
            assert len(texts) == 1 and "\n" not in texts[0][:-1]
            return
        assert "".join(result["train"] + result["validation"]) == "".join(texts)
        assert result["train"] and result["validation"]
        assert len(result["train"]) + len(result["validation"]) == len(texts) + done.cut_documents
        if done.cut_documents:
            assert result["train"][-1].endswith("\n")


def test_a_fraction_of_zero_holds_nothing_out() -> None:
    result, done = split(["only text"], 0.0)
    assert result == {"train": ["only text"], "validation": []}
    assert done.splitter.method == "none"
