from __future__ import annotations

import random

import pytest
from datatrove.pipeline.filters.gopher_repetition_filter import find_all_duplicate, find_top_duplicate, get_n_grams
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean.config import RepetitionConfig
from sheepop.data.clean.repeats import RepeatedRuns, screened
from sheepop.data.clean.words import tokens_of

# All words are equally long, because datatrove glues them together before it compares.
WORDS = st.lists(st.sampled_from(["one", "two", "six", "ten"]), max_size=60)


@given(WORDS, st.integers(5, 10))
def test_repeated_runs_are_those_that_datatrove_finds(words: list[str], n: int):
    runs = RepeatedRuns(tokens_of(" ".join(words)))
    for shorter in range(5, n):
        runs.repeated(shorter)
    assert runs.repeated(n) == find_all_duplicate(words, n)


@given(WORDS, st.integers(2, 4))
def test_the_most_frequent_run_is_the_one_that_datatrove_finds(words: list[str], n: int):
    expected = find_top_duplicate(get_n_grams(words, n)) if len(words) >= n else 0
    runs = RepeatedRuns(tokens_of(" ".join(words)))
    for shorter in range(2, n):
        runs.most_frequent(shorter, -1)
    assert runs.most_frequent(n, -1) == expected


@given(st.lists(WORDS, max_size=5))
def test_no_text_that_breaks_a_bound_passes_the_screen(texts: list[list[str]]):
    config = RepetitionConfig()
    suspects = screened([tokens_of(" ".join(words)) for words in texts], [len(" ".join(w)) for w in texts], config)
    for words, suspect in zip(texts, suspects, strict=True):
        size = len(" ".join(words))
        top = any(
            find_top_duplicate(get_n_grams(words, n)) > most * size for n, most in config.top_ngrams if len(words) >= n
        )
        again = any(find_all_duplicate(words, n) > most * size for n, most in config.duplicate_ngrams)
        assert suspect or not (top or again)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_screen_lets_ordinary_text_pass_and_knows_texts_apart(copies: int):
    chosen = random.Random(1)
    text = " ".join(f"{chosen.choice('abcdefgh')}{chosen.randint(0, 99)}" for _ in range(400))
    tokens = tokens_of(text)
    assert screened([tokens] * copies, [len(text)] * copies, RepetitionConfig()) == [False] * copies
