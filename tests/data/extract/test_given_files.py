"""Files that hold what was once lost or spoiled, with what their text is.

They are in the folder that the environment variable SHEEPOP_TEST_FILES names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.interface import Extracted, Refused

FOLDER = os.environ.get("SHEEPOP_TEST_FILES", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="SHEEPOP_TEST_FILES does not name a folder of files")

RUBY = "昨日、東京の図書館"
# Of each file what its text has, in this order, and what it must not have.
TEXTS: dict[str, tuple[list[str], list[str]]] = {
    "arabic.pdf": (["كتاب صغير", "مرحبا بالعالم", "سعر الكتاب 25 دينارا", "كلمة computer جاءت من الإنجليزية"], []),
    "book.fb2": (
        ["The Garden", "Chapter one", "[1]", "In the morning the sun came out.", "It rained in May."],
        ["eUK9", "AA-1"],
    ),
    "cjk_blog.html": (
        ["村里的春天", "春天的花园里下了一整夜的雨", "这就是我们村里春天的一天", "地址", "小河, 希望, 天气, 好"],
        ["热门", "分享"],
    ),
    "cp1254_tr.txt": (["Pijamalı hasta yağız şoföre çabucak güvendi, numara 0."], []),
    "cp1255_he.txt": (["שלום עולם, זה משפט קטן על הגן ומזג האוויר מספר 0."], []),
    "d2_strings.xlsx": (
        ["場所", "first line second line", "the code is _x0041_ here", "007", "in line"],
        ["x000D", "オオサカ"],
    ),
    "d3_ruby.docx": ([RUBY], ["とう"]),
    "d3_ruby.epub": ([RUBY], ["とう"]),
    "d3_ruby.html": ([RUBY], ["とう"]),
    "d3_ruby.odt": (["昨日、東京の図書館に行きました。"], ["とう"]),
    "d4_hidden.docx": (
        ["40 francs, payable in May.", "The hall opens", "30° and the constant α are given; tick ✔ when"],
        ["internal", "Draft"],
    ),
    "d4_nested.docx": (["| shirt | 19 | S 2; M 5 |", "| scarf | 8 | 11 |", "All prices"], []),
    "d5_form.pdf": (["Name of applicant: Wilhelmina Sandoval", "B-17", "near the old pear tree please"], []),
    "d5_freetext.pdf": (["The fee stays as it is.", "Correction: it rises to twelve"], []),
    "d6_hebrew.eml": (["Subject: הפגישה נדחתה", "שלום רב, הפגישה נדחתה ליום שני"], []),
    "d6_hebrew.html": (["שלום רב, הפגישה נדחתה ליום שני"], []),
    "d6_thai.html": (["การประชุมเลื่อนไปเป็นวันจันทร์เวลาสิบโมงเช้า"], []),
    "fallback.epub": (["The rain fell on the garden all night."], []),
    "form.pdf": (["First name:", "I would like to start in March", "Thank you"], []),
    "note_word.rtf": (["The river is long.", "Measured by boat in spring.", "It is also deep."], []),
    "nul_late.txt": (["Nummer 0 –", "„so ist es“."], ["\0"]),
    "one_bad_byte.txt": (["Nummer 0 –", "„so ist es“."], ["Ã", "\ufffd"]),
    "raw_latin1_subject.eml": (["Subject: Formação e Verão: promoção única", "só até amanhã"], []),
    "raw_utf8_subject.eml": (["Subject: Größe über café – 日本語 привет", "Der Text: Größe"], []),
    "release_notes.html": (
        ["# Release notes", "Bug 101", "Bug 103", "R. Example, The care", "S. Sample", "We thank"],
        [],
    ),
    "subscriptions.opml": (["Spring", "Sow the carrots", "Dig up the potatoes", "They keep until March"], []),
    "tis620.txt": (["นี่คือข้อความสั้นเกี่ยวกับสวนและอากาศ หมายเลข 0"], []),
    "zipped_again.odt": (["# Garden", "The rain fell on the garden all night."], ["manifest"]),
}
REFUSALS = {
    "drawing.vsdx": [("", "unsupported")],
    "nul_late.txt": [("byte 12,651", "undecodable")],
    "one_bad_byte.txt": [("byte 8,393", "undecodable")],
    "nul.jsonl": [("line 21", "invalid")],
}


@pytest.fixture(scope="module")
def extraction() -> Iterator[Extraction]:
    with closing(Extraction(ExtractConfig(ocr=False))) as extraction:
        yield extraction


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_lost_or_spoiled(name: str, extraction: Extraction) -> None:
    items = list(extraction.documents(Path(FOLDER, name), name))
    (text,) = (item.text for item in items if isinstance(item, Extracted))
    expected, wrong = TEXTS[name]
    at = 0
    for piece in expected:
        assert piece in text[at:]
        at = text.index(piece, at) + len(piece)
    assert not [piece for piece in wrong if piece in text]


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_named(name: str, extraction: Extraction) -> None:
    items = extraction.documents(Path(FOLDER, name), name)
    assert [(item.place, item.reason) for item in items if isinstance(item, Refused)] == REFUSALS[name]
