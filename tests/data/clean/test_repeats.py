from __future__ import annotations

from datatrove.pipeline.filters.gopher_repetition_filter import find_all_duplicate, find_top_duplicate, get_n_grams
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean.repeats import RepeatedRuns
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
