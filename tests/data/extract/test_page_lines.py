from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.extract.page_lines import (
    Glyph,
    Line,
    Page,
    is_right_to_left,
    logical,
    mirrored,
    reading_blocks,
    visual_pieces,
)
from sheepop.data.extract.paged_text import running_lines


def line(text: str, left: float, bottom: float, *, size: float = 10, width: float = 0, rigid: bool = False) -> Line:
    """A line of letters that are half as wide as high."""
    width = width or 0.5 * size * len(text)
    first = 0.5 * size * len(text.split(" ", 1)[0])
    return Line(text, left, bottom - 0.9 * size, left + width, bottom, size, first, rigid)


def column(name: str, left: float, count: int, *, pitch: float = 12, top: float = 100) -> list[Line]:
    return [line(f"{name}{number} of a column of running text", left, top + pitch * number) for number in range(count)]


def texts(lines: list[Line]) -> list[str]:
    return [item.text for block in reading_blocks(lines) for item in block]


@given(st.integers(2, 4), st.integers(4, 30), st.floats(0, 6), st.integers(0, 999))
def test_columns_are_read_from_left_to_right_whatever_the_order_in_the_file(
    count: int, rows: int, shift: float, seed: int
) -> None:
    columns = [column("abcd"[n], 50 + 200 * n, rows, top=100 + n * shift) for n in range(count)]
    lines = [item for items in columns for item in items]
    expected = [item.text for item in lines]
    random.Random(seed).shuffle(lines)

    assert texts(lines) == expected


def test_what_runs_across_the_columns_parts_them() -> None:
    head = line("A headline that runs across both of the columns of the page", 60, 80, size=14)
    middle = line("A caption that runs across both of the columns, under a figure", 60, 220, size=12)
    upper = column("a", 50, 8) + column("b", 300, 8)
    lower = column("c", 50, 8, top=250) + column("d", 300, 8, top=250)

    assert texts([*lower, middle, *upper, head]) == [item.text for item in (head, *upper, middle, *lower)]


def test_labels_in_the_margin_of_a_column_belong_to_it() -> None:
    left = column("a", 50, 12)
    right = column("b", 330, 12)
    labels = [line("[Abc12]", 290, item.bottom) for item in right[::2]]

    read = texts([*left, *right, *labels])

    assert read[:12] == [item.text for item in left]
    assert read[12] == f"[Abc12] {right[0].text}"


def test_cells_of_a_table_are_read_row_by_row_and_set_apart() -> None:
    rows = [["Merino", "75", "fine"], ["Texel", "95", "coarse"], ["Soay", "30", "brown"], ["Jacob", "60", "black"]]
    cells = [line(text, 50 + 100 * x, 100 + 15 * y) for y, row in enumerate(rows) for x, text in enumerate(row)]

    assert texts(sorted(cells, key=lambda cell: cell.left)) == ["   ".join(row) for row in rows]


def test_pieces_of_one_row_are_joined_by_their_distance() -> None:
    raised = line("2", 90.5, 96, size=7)
    assert texts([line("The area", 50, 100), raised, line("grows", 104, 100)]) == ["The area2 grows"]


def test_lines_above_each_other_stay_apart_however_close() -> None:
    assert texts([line("upper", 50, 100), line("lower", 50, 104)]) == ["upper", "lower"]


def test_columns_of_hebrew_are_read_from_right_to_left() -> None:
    right = [line("\u05d0\u05d1\u05d2 " + 20 * "\u05d3" + f" {n}", 300, 100 + 12 * n) for n in range(6)]
    left = [line("\u05d4\u05d5\u05d6 " + 20 * "\u05d7" + f" {n}", 50, 100 + 12 * n) for n in range(6)]

    assert is_right_to_left(left + right)
    assert texts(mirrored(left + right)) == [item.text for item in right + left]


HEBREW = st.text("\u05d0\u05d1\u05d2\u05d3\u05d4\u05d5", min_size=3, max_size=6)
OTHER = st.one_of(st.integers(0, 99999).map(str), st.text("abcde", min_size=1, max_size=3))


def shown(tokens: list[str], *, from_right: bool) -> str:
    """Words as a page shows them, from its left to its right; each other word stands between two Hebrew ones."""
    visual = [token[::-1] if is_hebrew(token) else token for token in tokens]
    return " ".join(reversed(visual) if from_right else visual)


def is_hebrew(token: str) -> bool:
    return "\u05d0" <= token[0] <= "\u05ea"


@given(st.lists(st.tuples(HEBREW, OTHER), min_size=1, max_size=6), HEBREW)
def test_a_hebrew_line_is_read_from_its_right_end(pairs: list[tuple[str, str]], last: str) -> None:
    tokens = [*(token for pair in pairs for token in pair), last]

    assert logical(shown(tokens, from_right=True)) == " ".join(tokens)


@given(st.lists(HEBREW, min_size=1, max_size=3), st.integers(0, 9999))
def test_hebrew_words_within_english_are_turned(words: list[str], number: int) -> None:
    run = shown([*words, str(number), words[0]], from_right=True)

    text = logical(f"These many English words come before it: {run} and these come after it.")

    read = " ".join([*words, str(number), words[0]])
    assert text == f"These many English words come before it: {read} and these come after it."


def test_letters_are_put_in_the_order_of_their_places() -> None:
    word = "\u05e9\u05dc\u05d5\u05dd"
    glyphs = [Glyph(letter, 100 - 5 * n, 105 - 5 * n) for n, letter in enumerate(word)]
    glyphs += [Glyph(letter, 50 + 5 * n, 55 + 5 * n) for n, letter in enumerate("ab")]
    for seed in range(5):
        random.Random(seed).shuffle(glyphs)
        assert [(piece.character, piece.left) for piece in visual_pieces(glyphs, 10)] == [("ab", 50), (word, 85)]


def test_a_mark_stays_with_its_letter_and_a_ligature_is_spelt_out() -> None:
    letters = [Glyph("\u05d1", 20, 25), Glyph("\u05d0", 30, 35), Glyph("\u05b7", 31, 34)]
    assert [piece.character for piece in visual_pieces(letters, 10)] == ["\u05d0\u05b7 \u05d1"]
    # Lam and alef as one letter of the presentation forms, after seen.
    assert visual_pieces([Glyph("\ufefb", 20, 25), Glyph("\u0633", 25, 30)], 10)[0].character == "\u0633\u0644\u0627"


def pages(count: int, *lines: tuple[str, float]) -> list[Page]:
    """Pages of a height of 1000; in a text N is the number of the page and S its square."""
    return [
        Page(
            number,
            1000,
            [line(text.replace("N", str(number)).replace("S", str(number**2)), 50, y) for text, y in lines],
        )
        for number in range(1, count + 1)
    ]


def gone(document: list[Page]) -> list[list[str]]:
    ids = running_lines(document)
    return [[item.text for item in page.lines if id(item) in ids] for page in document]


def test_a_running_head_stays_once_and_page_numbers_go() -> None:
    document = pages(6, ("Chapter of accidents", 40), ("text N", 500), ("- N -", 970))

    assert gone(document) == [["- 1 -"], *(["Chapter of accidents", f"- {n} -"] for n in range(2, 7))]


@pytest.mark.parametrize(
    ("count", "text", "y"),
    [
        (4, "On four pages only", 40),
        (9, "In the middle of the page", 500),
        (9, "Figures that S do not count", 40),
    ],
)
def test_a_line_is_kept_that_may_say_something(count: int, text: str, y: float) -> None:
    assert gone(pages(count, (text, y))) == [[]] * count


def test_a_line_that_moves_is_no_running_head() -> None:
    document = [Page(n, 1000, [line("The same words", 50, 40 + 15 * n)]) for n in range(1, 7)]

    assert gone(document) == [[]] * 6


def test_heads_of_even_and_odd_pages_both_run() -> None:
    document = [Page(n, 1000, [line("The author of it" if n % 2 else "Title of it", 50, 40)]) for n in range(1, 13)]

    assert gone(document) == [[], [], *(["The author of it" if n % 2 else "Title of it"] for n in range(3, 13))]
