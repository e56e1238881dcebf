from __future__ import annotations

import codecs
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.data.decoding import decode
from sheepop.data.documents import split_text
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.text import cut_point, extract_text, pieces_of

SMALL = 2**10


def no_inner(content: Content, place: str) -> Iterator[Extracted | Refused]:
    raise AssertionError("text holds no other files")


def extracted(data: bytes, name: str = "a.txt", limit: int = SMALL) -> list[Extracted | Refused]:
    context = Context(ExtractConfig(max_document_bytes=limit), Path("/nowhere"), no_inner)
    return list(extract_text(Content(name, data=data), context))


def text_of(items: list[Extracted | Refused]) -> str:
    assert all(isinstance(item, Extracted) for item in items)
    return "".join(item.text for item in items)


def test_line_breaks_and_indentation_are_exact():
    text = "def f():\n\tif x:\r\n\t    return 1   \r\n\n\n  # end\x0c\n"
    (document,) = extracted(text.encode())
    assert document.text == text
    assert document.place == ""
    assert document.metadata == {"encoding": "utf_8"}


@pytest.mark.parametrize(
    ("data", "name", "encoding"),
    [
        ("Grüße aus Köln. ".encode() * 200, "a.txt", "utf_8"),
        (codecs.BOM_UTF8 + "Grüße aus Köln.\n".encode() * 200, "a.txt", "utf_8"),
        (codecs.BOM_UTF16_LE + ("Grüße aus Köln.\n" * 200).encode("utf-16-le"), "a.txt", "utf_16_le"),
        (codecs.BOM_UTF32_BE + ("Grüße aus Köln.\n" * 200).encode("utf-32-be"), "a.txt", "utf_32_be"),
        ("Où est le château de Bérénice? Là-bas, près du fleuve.\n".encode("cp1252") * 100, "a.txt", "cp1252"),
        ("Съешь же ещё этих мягких французских булок.\n".encode("cp1251") * 100, "a.txt", "cp1251"),
        (
            "どこで生れたかとんと見当がつかぬ。ニャーニャー泣いていた事だけは記憶している。\n".encode("cp932") * 50,
            "a.txt",
            "cp932",
        ),
        ("# -*- coding: koi8-r -*-\n# Съешь же\n".encode("koi8-r") + b"x = 1\n" * 400, "a.py", "koi8_r"),
    ],
)
def test_a_large_file_is_read_as_a_small_one_is(data: bytes, name: str, encoding: str):
    assert decode(data, name).encoding == encoding, "the oracle"
    large, whole = extracted(data, name, limit=SMALL), extracted(data, name, limit=2**20)
    assert len(whole) == 1
    assert len(large) > 1
    assert text_of(large) == text_of(whole) == decode(data, name).text
    assert {item.metadata["encoding"] for item in large + whole} == {encoding}
    assert [item.place for item in large] == [f"piece {number}" for number in range(1, len(large) + 1)]


@pytest.mark.parametrize("block", [7, 64, 1000])
@settings(max_examples=30)
@given(
    text=st.text(st.sampled_from("ab\n\r é漢"), min_size=1100, max_size=1500),
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-32"]),
)
def test_pieces_do_not_depend_on_how_the_file_is_read(text: str, encoding: str, block: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sheepop.data.decoding._BLOCK", block)
        items = extracted(text.encode(encoding))
    runs = [item for item in items if isinstance(item, Refused)]
    if not runs:
        assert text_of(items) == text
        assert all(len(item.text.encode()) <= SMALL for item in items)
    assert items == extracted(text.encode(encoding))


def test_lines_and_blocks_are_the_same_whether_the_file_is_cut_or_not():
    block = "first line\nsecond line with more words\n\n"
    text = block * 300
    items = extracted(text.encode())
    assert len(items) > 10
    for mode in ("line", "blank_line"):
        assert [part for item in items for part in split_text(item.text, mode)] == split_text(text, mode)


def test_a_line_without_end_is_refused_and_the_rest_is_kept():
    data = b"one\n\n" + b"x" * 5000 + b" y\n" + b"two\n" * 600 + b"z" * 3000
    items = extracted(data)
    refused = [item for item in items if isinstance(item, Refused)]
    assert [(item.place, item.reason) for item in refused] == [("line 3", "oversized"), ("line 604", "oversized")]
    assert "5,000 bytes without a line end or blank" in refused[0].detail
    assert "max_document_bytes = 1,024" in refused[0].detail
    assert "3,000 bytes" in refused[1].detail
    kept = "".join(item.text for item in items if isinstance(item, Extracted))
    assert kept == "one\n\n y\n" + "two\n" * 600


def test_one_line_of_many_words_is_cut_between_words():
    text = "word " * 1000
    items = extracted(text.encode())
    assert text_of(items) == text
    assert all(item.text.endswith(" ") for item in items)


def test_a_line_of_gigabytes_takes_no_memory(tmp_path: Path):
    path = tmp_path / "line.txt"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b"x" * 2**20)
    context = Context(ExtractConfig(max_document_bytes=2**20), tmp_path, no_inner)
    tracemalloc.start()
    (refused,) = extract_text(Content("line.txt", path=path), context)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(refused, Refused)
    assert (refused.place, refused.reason) == ("line 1", "oversized")
    assert refused.detail.startswith("104,857,600 bytes")
    assert peak < 20 * 2**20


@pytest.mark.parametrize("size", [100, 5000])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"text\n" * 10 + b"\0", "binary"),
        (b"\x01\x02\x03\x04" * 5, "binary"),
        (b"\x8f\x01caf\xe9 " * 4, "binary"),
    ],
)
def test_binary_content_is_refused_small_and_large_with_the_same_words(data: bytes, reason: str, size: int):
    data = data * (size // len(data) + 1)
    with pytest.raises(ExtractionError) as oracle:
        decode(data, "a.txt")
    with pytest.raises(ExtractionError) as caught:
        extracted(data)
    assert caught.value.reason == oracle.value.reason == reason
    assert caught.value.detail == oracle.value.detail


def test_a_nul_far_into_a_large_file_is_found_before_anything_is_handed_on():
    data = b"a line\n" * 10_000 + b"\0" * 80
    context = Context(ExtractConfig(max_document_bytes=SMALL), Path("/nowhere"), no_inner)
    items = extract_text(Content("a.txt", data=data), context)
    with pytest.raises(ExtractionError, match="NUL byte at offset 70,000"):
        next(items)


@pytest.mark.parametrize("limit", [SMALL, 2**24])
@pytest.mark.parametrize(
    ("damage", "place"), [(b"\0", "byte 36,000"), (b"\x81", "byte 36,000"), (b"\xc3\0\x80", "bytes 36,000 to 36,002")]
)
def test_a_few_bad_bytes_are_left_out_and_named(damage: bytes, place: str, limit: int):
    text = "Grüße und Küsse aus Köln am Rh.\n" * 2000
    data = text.encode()
    assert data[35_999:].startswith("\nGrüße".encode())
    *items, last = extracted(data[:36_000] + damage + data[36_000:], limit=limit)
    assert text_of(items) == text
    assert isinstance(last, Refused) and (last.place, last.reason) == (place, "undecodable")


@pytest.mark.parametrize("limit", [SMALL, 2**24])
def test_a_file_that_was_cut_inside_a_character_keeps_the_rest(limit: int):
    *items, last = extracted(("Grüße.\n" * 300 + "ü").encode()[:-1], limit=limit)
    assert text_of(items) == "Grüße.\n" * 300
    assert isinstance(last, Refused) and last.place == "byte 2,700"


def test_mixed_encodings_are_decided_as_a_small_file_s_are():
    data = "Grüße und Küsse aus Köln am Rhein.\n".encode() * 50 + "Grüße und Küsse.\n".encode("cp1252") * 50
    assert text_of(extracted(data)) == decode(data, "a.txt").text


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
