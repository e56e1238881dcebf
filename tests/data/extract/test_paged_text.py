from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.extract.page_lines import Line
from sheepop.data.extract.paged_text import join_lines, paragraphs

WORD = st.text("abcdefgh", min_size=1, max_size=9)
PARAGRAPH = st.lists(WORD, min_size=12, max_size=60).map(lambda words: " ".join(words).capitalize() + ".")


def placed(rows: list[str], *, left: float = 50, top: float = 100, pitch: float = 12, size: float = 10) -> list[Line]:
    """Rows of letters that are half as wide as high; leading blanks indent."""
    lines = []
    for number, row in enumerate(rows):
        text = row.strip()
        if text:
            begin, bottom = left + 0.5 * size * (len(row) - len(row.lstrip())), top + pitch * number
            first = 0.5 * size * len(text.split()[0])
            end = begin + 0.5 * size * len(text)
            lines.append(Line(text, begin, bottom - 0.9 * size, end, bottom, size, first))
    return lines


@given(st.lists(PARAGRAPH, min_size=1, max_size=5), st.integers(40, 90))
def test_wrapped_text_is_unwrapped_again(texts: list[str], width: int) -> None:
    rows = [row for text in texts for row in [*textwrap.wrap(text, width), ""]]

    assert paragraphs([placed(rows)], frozenset()) == "\n\n".join(texts)


@pytest.mark.parametrize(
    ("before", "after", "words", "joined"),
    [
        ("the miss-", "ing ewe", "", "the missing ewe"),
        ("the miss\u00ad", "ing ewe", "", "the missing ewe"),
        ("the rain-", "soaked hill", "rain-soaked", "the rain-soaked hill"),
        ("the rain-", "soaked hill", "rain-soaked rainsoaked", "the rainsoaked hill"),
        ("a well-", "known dog", "", "a well-known dog"),
        ("the Anglo-", "Saxon age", "", "the Anglo-Saxon age"),
        ("the COVID-", "19 years", "", "the COVID-19 years"),
        ("of the NATO-", "led force", "", "of the NATO-led force"),
        ("two-", "and three-year-old rams", "", "two- and three-year-old rams"),
        ("as it was -", "or seemed", "", "as it was - or seemed"),
        ("pages 10\u2013", "12 of it", "", "pages 10\u201312 of it"),
        ("it was \u2013", "or seemed", "", "it was \u2013 or seemed"),
        ("at https://", "example.org", "", "at https://example.org"),
        ("\u7f8a\u5728\u5c71", "\u4e0a\u5403\u8349", "", "\u7f8a\u5728\u5c71\u4e0a\u5403\u8349"),
        ("one line", "and another", "", "one line and another"),
    ],
)
def test_two_lines_become_one(before: str, after: str, words: str, joined: str) -> None:
    assert join_lines(before, after, frozenset(words.split())) == joined


def test_verse_and_code_and_lists_keep_their_lines() -> None:
    rows = [
        "for sheep in flock:",
        "    if sheep.is_lost:",
        "        search(sheep, where='behind the chapel', until=dusk)",
        "    else:",
        "        count += 1",
    ]
    assert paragraphs([placed(rows)], frozenset()).split("\n") == [row.strip() for row in rows]
    items = [f"\u2022 an item of this list that is about as long as every other item of it is {n}" for n in range(5)]
    assert paragraphs([placed(items)], frozenset()).split("\n") == items


def test_the_entries_of_a_table_of_contents_stay_lines() -> None:
    entries = [f"{n} A chapter of this book . . . . . . . . . . . . . . . {n + 10}" for n in range(1, 6)]

    assert paragraphs([placed(entries)], frozenset()).split("\n") == entries


def test_a_paragraph_goes_on_at_the_head_of_the_next_column() -> None:
    text = "The dog had already gone to look along the wall before anybody in the house had thought of asking it to."
    rows = textwrap.wrap(text, 40)
    columns = [placed(["Another paragraph that is as wide as it.", "", *rows[:2]]), placed(rows[2:], left=400)]

    assert paragraphs(columns, frozenset()).endswith(f"\n\n{text}")


def test_a_table_stands_by_itself() -> None:
    (before,), (after,) = placed(["The text before it,"]), placed(["and the text after it."], top=200)
    table = Line("| a |\n| --- |", 50, 110, 200, 180, 1, 0, rigid=True)

    assert paragraphs([[before, table, after]], frozenset()) == (
        "The text before it,\n\n| a |\n| --- |\n\nand the text after it."
    )
