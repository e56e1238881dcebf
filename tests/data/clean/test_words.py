from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean import words
from sheepop.data.clean.words import tokens_of, tokens_of_all

TEXT = st.text(st.sampled_from("ab Z9.,-'’…“”()/:@$é日😀\n\t_%+"), max_size=60)


def spelled(text: str) -> list[str]:
    """The tokens of a text as strings."""
    lengths, solid = tokens_of(text).lengths.tolist(), "".join(text.split())
    assert sum(lengths) == len(solid)
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [solid[end - length : end] for length, end in zip(lengths, ends, strict=True)]


@cache
def spacy_tokenizer() -> Any:
    import spacy

    return spacy.blank("en").tokenizer


def spacy_words(text: str) -> list[str]:
    return [token.text for token in spacy_tokenizer()(text) if token.text.strip()]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "(It was) 'quoted' and \"double-quoted\" text...",
        "state-of-the-art yes/no/maybe 3-4 covid-19 long--dash",
        "Don't, can't, she'll, they've, I'm, it's, the dogs' bones, O'Neil's",
        "https://example.com/a-b?c=d, mail.me@example.org; os.path.join(a, b)",
        "3.14 + 2 = 5.14, 1,000,000 and $5, 10% of 20€",
        "e.g. this, i.e. that, U.S. and x. End of line.",
        "See [1] and {2}; <tag> #hash *bold* _under_ `code` ~approx~",
        "snake_case foo(bar) a.b.c lower.Upper",
        "«Bonjour» – dit-il… “oui”",
    ],
)
def test_ordinary_text_is_cut_as_spacy_cuts_it(text: str):
    assert spelled(text) == spacy_words(text)


def test_nearly_all_pieces_of_documentation_are_cut_as_spacy_cuts_them(prose: list[str]):
    pieces = sorted({piece for text in prose for piece in text.split()})
    same = sum(spelled(piece) == spacy_words(piece) for piece in pieces)
    assert len(pieces) > 2000
    assert same >= 0.985 * len(pieces)


@given(st.lists(TEXT, max_size=6))
def test_texts_cut_together_are_cut_as_each_alone(texts: list[str]):
    for text, together in zip(texts, tokens_of_all(texts), strict=True):
        alone = tokens_of(text)
        for name in ("lengths", "is_word", "has_letter"):
            assert getattr(together, name).tolist() == getattr(alone, name).tolist()
        assert together.hashes().tolist() == alone.hashes().tolist()


@given(TEXT)
def test_tokens_are_the_text_without_white_space_and_know_what_they_are(text: str):
    tokens, strings = tokens_of(text), spelled(text)
    assert "".join(strings) == "".join(text.split())
    assert tokens.has_letter.tolist() == [any(map(str.isalpha, token)) for token in strings]
    hashes = tokens.hashes().tolist()
    assert len(set(zip(strings, hashes, strict=True))) == len(set(strings)) == len(set(hashes))


def test_what_counts_as_a_word_is_what_datatrove_counts(prose: list[str]):
    from datatrove.utils.text import PUNCTUATION_SET

    for text in prose[::10]:
        expected = [any(character not in PUNCTUATION_SET for character in token) for token in spelled(text)]
        assert tokens_of(text).is_word.tolist() == expected


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(words, "BLOCK_CHARACTERS", 500)
    words._powers.cache_clear()
    yield
    words._powers.cache_clear()


@pytest.fixture(scope="module")
def long_text(prose: list[str]) -> tuple[str, list[int], list[int]]:
    """A text, and the lengths and hashes of its tokens when it is one block."""
    text = "\n".join(prose[:60])
    tokens = tokens_of(text)
    return text, tokens.lengths.tolist(), tokens.hashes().tolist()


@pytest.mark.usefixtures("small_blocks")
def test_a_long_text_is_cut_in_blocks_without_a_trace(long_text: tuple[str, list[int], list[int]]):
    text, lengths, hashes = long_text
    tokens = tokens_of(text)
    assert tokens.lengths.tolist() == lengths
    # The numbers are others, but the same tokens have the same.
    assert len(set(zip(tokens.hashes().tolist(), hashes, strict=True))) == len(set(hashes))


def test_a_megabyte_without_white_space_is_cut():
    assert int(tokens_of("x" * 1_000_000).lengths.sum()) == 1_000_000
    assert int(tokens_of("é(" * 500_000).lengths.sum()) == 1_000_000
