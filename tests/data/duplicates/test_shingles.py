from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.duplicates.shingles import (
    ALONE,
    WORD,
    Hashes,
    character_table,
    distinct,
    shingles_of_words,
    word_hashes,
)

KINDS = ("prose", "chat", "code", "table")
CHARACTERS = st.one_of(
    st.sampled_from("aAbBzZ019_ \n\t.,;:()[]{}+-*/='\"#@\x00\x07\x1b"),
    st.sampled_from("äÄßéİıςΣжЖ한글–—“”…\u00a0\u00ad\u200d\u0301中文字かなカナｶﾅไทย👍\U00020000\U0002a6df\U000e0001"),
    st.characters(exclude_categories=("Cn", "Cs")).filter(lambda c: unicodedata.name(c, "") != ""),
)
TEXTS = st.lists(st.one_of(CHARACTERS, st.sampled_from(["the ", "the ", "x = ", "a" * 64, "b" * 70, "中文"]))).map(
    "".join
)


def shingles(text: str, kind: str, words: int) -> Hashes:
    return shingles_of_words(word_hashes(text, kind), kind, words)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(KINDS), st.integers(1, 6))
def test_shingles_are_equal_exactly_where_the_words_are(slow: Any, texts: list[str], kind: str, count: int) -> None:
    hashes = [int(value) for text in texts for value in shingles(text, kind, count)]
    words = [shingle for text in texts for shingle in slow.shingle_list(text, kind, count)]
    assert len(hashes) == len(words)
    assert len(set(zip(hashes, words, strict=True))) == len(set(hashes)) == len(set(words))


def test_letters_of_scripts_without_spaces_are_words_by_themselves(slow: Any) -> None:
    roles = character_table("words").roles
    # Python does not name every sign of these scripts.
    unnamed = {c for c in range(0x20000) if not unicodedata.name(chr(c), "")}
    for code in sorted(set(range(0x20000)) - unnamed):
        expected = unicodedata.category(chr(code))[0] in "LNM"
        assert (roles[code] in (WORD, ALONE)) == expected
        if expected:
            assert (roles[code] == ALONE) == slow.alone(chr(code)), hex(code)


def test_rare_ideographs_are_told_apart() -> None:
    assert distinct(word_hashes("\U00020000\U0002a6df\U00030000\U00020000", "prose")).size == 3


def test_case_punctuation_and_line_breaks_make_no_difference_in_prose() -> None:
    plain = "the quick brown fox it s jumping over"
    for text in ("The quick, brown fox: IT’S\n\njumping -- over!", "The_quick *brown* fox\u00a0“it's” Jumping…over"):
        assert np.array_equal(shingles(text, "prose", 5), shingles(plain, "prose", 5))


def test_code_differs_by_case_and_punctuation_but_not_by_white_space() -> None:
    code = "def run(a, b):\n    return a[b] - Run"
    same = "def run( a,b ) :\n\treturn  a [b]\n- Run\n"
    assert np.array_equal(shingles(code, "code", 5), shingles(same, "code", 5))
    for other in (code.replace("-", "+"), code.replace("Run", "run"), code.replace("a, b", "a b")):
        assert not np.array_equal(shingles(code, "code", 5), shingles(other, "code", 5))


def test_kinds_compared_by_different_rules_share_no_shingle() -> None:
    text = "one two three four five six seven"
    assert np.array_equal(shingles(text, "prose", 5), shingles(text, "chat", 5))
    assert np.array_equal(shingles(text, "code", 5), shingles(text, "table", 5))
    assert not set(shingles(text, "prose", 5).tolist()) & set(shingles(text, "code", 5).tolist())


def test_a_text_of_few_words_is_one_shingle_and_a_text_without_words_none() -> None:
    assert shingles("Two words", "prose", 5).size == 1
    assert np.array_equal(shingles("Two words", "prose", 5), shingles("two words.", "prose", 5))
    assert shingles("!!! ... \n", "prose", 5).size == shingles("", "code", 5).size == 0
    assert shingles("!!! ... \n", "code", 5).size == 1


def test_words_are_the_same_wherever_they_stand_in_a_long_text() -> None:
    text = "alpha beta gamma " * 9000
    for variant in (text, text + "é"):
        hashes = word_hashes(variant, "prose")
        assert np.array_equal(hashes[:27000].reshape(-1, 3), np.tile(hashes[:3], (9000, 1)))
    assert np.array_equal(word_hashes(text, "prose"), word_hashes(text + "é", "prose")[:-1])


def test_two_million_shingles_have_two_million_hashes() -> None:
    words = 2**21
    text = " ".join(np.random.default_rng(3).integers(0, 3000, words).astype("U4").tolist())
    assert distinct(shingles(text, "prose", 5)).size == words - 4
    numbers = " ".join(map(str, range(words)))
    assert distinct(word_hashes(numbers, "prose")).size == words


def test_a_long_run_without_spaces_is_cut_into_words() -> None:
    blob = "".join(np.random.default_rng(0).choice(list("abcdef0123456789"), 2**20).tolist())
    assert word_hashes(blob, "prose").size == 2**14
    assert np.array_equal(word_hashes(blob + "xyz", "prose")[:-1], word_hashes(blob, "prose"))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown kind of document 'poem'; the known kinds are prose, chat, code, table"
    ):
        shingles("a b c", "poem", 5)


def test_lone_surrogates_do_not_stop_the_comparison() -> None:
    assert shingles("a \ud800 b \ud800", "prose", 2).size == 1
