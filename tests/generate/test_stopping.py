"""Stop strings, against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.generate.stop_strings import StopMatcher

# Two letters, so that partial and overlapping matches are the rule.
WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


def expected_text(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Reads the text one character at a time until it ends in a stop string; the longest one counts."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12), stop=st.lists(WORDS, max_size=4))
def test_any_cut_of_the_text_gives_what_a_search_of_the_whole_gives(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    text, found = expected_text("".join(pieces), stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert text.startswith(shown)  # shown text is never taken back
    assert shown + matcher.finish() == text
    assert matcher.matched == found


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stop=st.lists(WORDS, min_size=1, max_size=4))
def test_only_what_may_still_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = matcher.push(text)
    if matcher.matched is None:
        longest = max(n for word in stop for n in range(len(word)) if text.endswith(word[:n]))
        assert text[len(shown) :] == text[len(text) - longest :]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("aaab", ["aab"], "a"),
        ("abababc", ["ababc"], "ab"),
        ("STOP", ["STOP"], ""),
        ("abcd", ["bcd", "c"], "ab"),  # c is complete first
        ("abcd", ["cd", "bcd"], "a"),  # both end at d: the longer one
        ("wo der Zug hält", ["hält"], "wo der Zug "),
        ("no end", ["END"], "no end"),
    ],
)
def test_by_hand(text: str, stop: list[str], expected: str) -> None:
    for size in (1, 2, 100):
        matcher = StopMatcher(stop)
        shown = "".join(matcher.push(text[i : i + size]) for i in range(0, len(text), size))
        assert shown + matcher.finish() == expected


def test_after_a_stop_string_nothing_is_shown() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("abxcd") == "ab"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""
