from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.documents import split_text
from sheepop.data.extract.interface import Extracted
from sheepop.data.extract.text import cut_point, pieces_of

texts = st.text(st.sampled_from("ab \t\n\ré漢🐑"), max_size=200)


def pieces(text: str, limit: int) -> list[Extracted]:
    return list(pieces_of(Extracted(text), limit))


def test_the_first_piece_ends_at_the_best_place_that_there_is():
    assert cut_point(b"one\n\ntwo three\nfour", 10) == 5, "a blank line"
    assert cut_point(b"one\n\ntwo three\nfour five", 16) == 15, "no blank line in the second half: a line end"
    assert cut_point(b"one two three four", 10) == 8, "no line end: a blank"
    assert cut_point(b"one\ttwothree", 8) == 4
    assert cut_point(b"onetwothreefour", 8) == 0, "nowhere"
    assert cut_point(b"one\rtwo\rthree", 9) == 8


def test_a_carriage_return_is_not_torn_from_its_line_feed():
    assert cut_point(b"one\r\ntwo", 4) == 0
    assert cut_point(b"a\rbcd\r\ntwo", 6) == 2
    assert cut_point(b"one\r\ntwo", 5) == 5
    assert cut_point(b"a\r\n\r\nb", 5) == 5


@given(texts, st.integers(4, 60))
def test_pieces_put_together_are_the_text_and_none_is_too_long(text: str, limit: int):
    found = pieces(text, limit)
    assert "".join(piece.text for piece in found) == text
    assert all(len(piece.text.encode("utf-8")) <= limit for piece in found)
    assert all(piece.text for piece in found) or text == ""


@given(texts.filter(lambda text: "\n" in text), st.integers(40, 80))
def test_cutting_at_line_ends_leaves_the_lines_as_they_are(text: str, limit: int):
    longest = max(len(line.encode("utf-8")) for line in split_text(text, "line") or [""])
    if longest + 2 <= limit:
        found = pieces(text, limit)
        assert [line for piece in found for line in split_text(piece.text, "line")] == split_text(text, "line")


def test_pieces_are_numbered_after_the_place_and_carry_their_marks():
    document = Extracted(
        "page one\n" * 3 + "page two\n" * 3, place="member a.pdf", marks=((0, "page 1"), (27, "page 2")), kind="table"
    )
    found = list(pieces_of(document, 20))
    assert [piece.text for piece in found] == ["page one\n" * 2, "page one\npage two\n", "page two\n" * 2]
    assert [piece.place for piece in found] == [f"member a.pdf, piece {number}" for number in (1, 2, 3)]
    assert [piece.marks for piece in found] == [
        ((0, "page 1"),),
        ((0, "page 1"), (9, "page 2")),
        ((0, "page 2"),),
    ]
    assert {piece.kind for piece in found} == {"table"}


def test_marks_count_characters_not_bytes():
    found = list(pieces_of(Extracted("漢漢漢\n漢漢\n漢\n", marks=((0, "a"), (4, "b"), (7, "c"))), 17))
    assert [piece.text for piece in found] == ["漢漢漢\n漢漢\n", "漢\n"]
    assert [piece.marks for piece in found] == [((0, "a"), (4, "b")), ((0, "c"),)]


def test_a_document_that_fits_is_handed_on_as_it_is():
    document = Extracted("é" * 10)
    assert list(pieces_of(document, 20)) == [document]
    assert [piece.place for piece in pieces_of(document, 19)] == ["piece 1", "piece 2"]
