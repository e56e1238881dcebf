"""Subtitles: sentences come back whole, without times, numbers and markup, and nothing that is said is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sheepop.data.extract.detection import FileType, detect
from sheepop.data.extract.interface import Content, Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

SRT = """1
00:00:01,000 --> 00:00:03,500
<i>The ferry leaves</i>
at seven

2
00:00:03,600 --> 00:00:05,000 X1:40 X2:600
every morning. {\\an8}It is small.

3
00:00:05,100 --> 00:00:07,000
- And when does it
come back?
- At noon,

behind the blank line.
4
00:00:20,000 --> 00:00:22,000
1947
"""
# The example of section 1.1 and notes of section 4.1 of https://www.w3.org/TR/webvtt1/ in words of our own.
VTT = """WEBVTT - The ferry
Kind: captions

STYLE
::cue { color: white }

NOTE
nobody says this

intro
00:01.000 --> 00:04.000 align:start position:0%
<v Ada>The <c.loud>mail</c> &amp; the bread</v>

00:04.000 --> 00:05.000
come <00:04.500>at noon.
"""
# Captions as a video site makes them while it listens: each line is shown again above the next.
ROLLING = """WEBVTT

00:00.000 --> 00:02.000
&nbsp;
the<00:00.500><c> ferry</c>

00:02.000 --> 00:02.010
the ferry
&nbsp;

00:02.010 --> 00:04.000
the ferry
leaves<00:03.000><c> now</c>
"""
ASS = """[Script Info]
Title: Nobody says this
[V4+ Styles]
Format: Name, Fontname
Style: Default,Arial
[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
Comment: 0,0:00:00.00,0:00:01.00,Default,,0,0,0,,Nobody says this
Dialogue: 0,0:00:01.00,0:00:03.50,Default,,0,0,0,,{\\i1}The ferry,{\\i0} the small one,\\Nleaves.
Dialogue: 0,0:00:03.00,0:00:04.00,Default,,0,0,0,,{\\p1}m 0 0 l 100 0{\\p0}
Dialogue: 0,0:00:04.00,0:00:05.00,Default,,0,0,0,,It comes back.
"""


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        (
            "a.srt",
            SRT,
            [
                "The ferry leaves at seven every morning. It is small.",
                "- And when does it come back?",
                "- At noon, behind the blank line.",
                "1947",
            ],
        ),
        ("a.vtt", VTT, ["The mail & the bread come at noon."]),
        ("a.vtt", ROLLING, ["the ferry leaves now"]),
        ("a.ass", ASS, ["The ferry, the small one, leaves.", "It comes back."]),
    ],
)
def test_what_is_said_is_left_in_whole_sentences(read_as: ReadAs, name: str, source: str, expected: list[str]) -> None:
    data = source.encode()
    assert detect(Content(name, data=data)) == FileType("subtitles")
    (item,) = read_as("subtitles", data, name)
    assert isinstance(item, Extracted)
    assert (item.kind, item.text.splitlines()) == ("prose", expected)


def test_line_ends_and_encodings_of_other_machines_are_read(read_as: ReadAs) -> None:
    data = "1\r\n00:00:01,000 --> 00:00:02,000\r\nOù êtes-vous né, élève ?\r\n".encode("cp1252")
    (item,) = read_as("subtitles", data, "a.srt")
    assert isinstance(item, Extracted)
    assert (item.text, item.metadata["encoding"]) == ("Où êtes-vous né, élève ?\n", "cp1252")


def test_long_subtitles_come_in_parts_and_a_line_over_the_limit_is_refused(read_as: ReadAs) -> None:
    cues = [f"{n}\n00:{n // 60:02}:{n % 60:02},000 --> 00:59:00,000\nSentence {n}.\n\n" for n in range(1, 900)]
    cues[500] = cues[500].replace("Sentence", "x" * 10_000)
    items = read_as("subtitles", "".join(cues).encode(), "a.srt", max_document_bytes=4096)
    texts = [item.text for item in items if isinstance(item, Extracted)]
    assert "".join(texts).splitlines() == [f"Sentence {n}." for n in range(1, 900) if n != 501]
    assert [item.place for item in items if isinstance(item, Refused)] == ["line 2003"]


def test_a_file_without_cues_is_plain_text(read_as: ReadAs) -> None:
    (item,) = read_as("subtitles", b"Only\nwords.\n", "a.srt")
    assert isinstance(item, Extracted)
    assert item.text == "Only\nwords.\n"
