from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.decoding import Decoded, decode
from sheepop.data.extract.interface import ExtractionError

FRENCH = "Élève à l'école : où êtes-vous né ? Ça va très bien. Les forêts françaises sont belles l'été.\n"
JAPANESE = "これは日本語の文章です。東京は日本の首都であり、多くの人々が住んでいます。\n"
RUSSIAN = "Это русский текст. Москва является столицей России, а Санкт-Петербург стоит на Неве.\n"
GERMAN = "Die Straße führt über die Brücke zum größten Gebäude der Stadt. Äpfel, Öl, Übung.\n"
POLISH = "Zażółć gęślą jaźń. Wszyscy ludzie rodzą się wolni i równi pod względem swej godności.\n"

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\r"), min_size=1)


@given(texts)
def test_utf8_is_taken_as_it_is(text: str) -> None:
    assert decode(text.encode("utf-8")).text == text.removeprefix("\ufeff")


@given(texts, st.sampled_from(["utf_8", "utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"]))
def test_a_byte_order_mark_names_the_encoding_and_goes(text: str, encoding: str) -> None:
    decoded = decode(("\ufeff" + text).encode(encoding))
    assert (decoded.text, decoded.encoding) == (text, encoding)


@pytest.mark.parametrize("encoding", ["utf_16_le", "utf_16_be"])
@pytest.mark.parametrize(
    "text",
    [
        "The ferry leaves at seven.\r\n",
        "Паром уходит в семь часов утра – каждый день.\n",
        "羊は丘の上で草を食べる。\n雨の日は一日中、小屋で眠っている。\n",
        "양은 언덕에서 풀을 먹는다.\n",
    ],
)
def test_utf16_without_a_mark_is_known_by_its_nuls(text: str, encoding: str) -> None:
    assert decode(text.encode(encoding)) == Decoded(text, encoding)


@pytest.mark.parametrize(
    "data",
    [
        array("h", range(-300, 300)).tobytes(),
        array("H", [3, 1, 4, 1, 5, 9, 2, 6] * 20).tobytes(),
        array("i", range(60, 90)).tobytes(),
        b"HOME=/root\0PWD=/\0LANG=C.UTF-8\0" * 4,
        b"abc\0def\0ghi\0jkl\0mno\0",
        "a\0b, and words".encode("utf-16-le"),
    ],
)
def test_numbers_and_texts_between_nuls_are_not_utf16(data: bytes) -> None:
    with pytest.raises(ExtractionError, match="binary"):
        decode(data)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FRENCH, "latin_1"),
        (FRENCH.replace("bien", "bœuf – « 5 € »"), "cp1252"),
        (GERMAN, "latin_1"),
        (GERMAN, "cp1252"),
        ("Où êtes-vous né ? À l'été, déjà !\n", "latin_1"),
        ("Å ä ö är på två\n", "latin_1"),
        ("¿Qué pasó? ¡Mañana será otro día!\n", "latin_1"),
        ("café\n", "latin_1"),
        (POLISH, "cp1250"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8_r"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        ("# auteur: Jérôme\ndef f(x):\n\treturn x + 1\r\n", "latin_1"),
    ],
)
@pytest.mark.parametrize("repeats", [1, 30, 8000])
def test_other_encodings_are_detected(text: str, encoding: str, repeats: int) -> None:
    assert decode((text * repeats).encode(encoding)).text == text * repeats


def test_a_large_file_is_judged_by_the_lines_that_are_not_ascii() -> None:
    text = "plain line\n" * 200_000 + FRENCH + "plain line\n" * 200_000
    assert decode(text.encode("latin_1")).text == text


def test_newlines_and_indentation_stay() -> None:
    text = "if x:\r\n\treturn\r    y\n\n \n"
    assert decode(text.encode()).text == text


class TestCodingCookie:
    def test_it_decides_for_python_source(self) -> None:
        source = "#!/usr/bin/python\n# -*- coding: koi8-r -*-\nname = 'Привет'\n"
        assert decode(source.encode("koi8_r"), "a.py").text == source

    def test_it_is_believed_over_utf8(self) -> None:
        data = "# coding: latin-1\ns = 'é'\n".encode()
        assert decode(data, "a.py").text == "# coding: latin-1\ns = 'Ã©'\n"
        assert decode(data, "a.txt").text == "# coding: latin-1\ns = 'é'\n"

    @pytest.mark.parametrize(
        "name", ["no-such-codec", "utf-16", "unicode_escape", "rot13", "punycode", "zlib", "..", "ascii"]
    )
    def test_one_that_cannot_be_true_is_not_believed(self, name: str) -> None:
        source = f"# coding: {name}\ns = 'é\\ud800'\n"
        assert decode(source.encode("utf-8"), "a.py").text == source

    def test_after_code_it_is_only_a_comment(self) -> None:
        source = "x = 1\n# coding: latin-1\ns = 'é'\n"
        assert decode(source.encode("utf-8"), "a.py").text == source


class TestBinary:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x7fELF\x02\x01\x01\x00\x00",
            b"text with one \0 in it",
            b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
            b"\xef\xbb\xbfa\0b",
            b"\xff\xfea\0\0\0",
            bytes(range(1, 32)) * 10,
        ],
    )
    def test_it_is_refused(self, data: bytes) -> None:
        with pytest.raises(ExtractionError) as caught:
            decode(data)
        assert caught.value.reason == "binary"

    def test_compressed_bytes_without_nul_are_refused(self) -> None:
        generator = random.Random(0)
        data = bytes(generator.choice(range(1, 256)) for _ in range(4000))
        with pytest.raises(ExtractionError) as caught:
            decode(data)
        assert caught.value.reason == "binary"

    def test_terminal_escapes_and_form_feeds_are_text(self) -> None:
        assert decode(b"\x1b[31mred\x1b[0m\x0c\nnext page\x08\n").text.startswith("\x1b[31m")

    @given(st.binary(min_size=1, max_size=300))
    def test_any_bytes_give_text_or_a_reason(self, data: bytes) -> None:
        try:
            text = decode(data, "x.py").text
        except ExtractionError as error:
            assert error.reason in ("binary", "undecodable")
        else:
            assert "\0" not in text
            text.encode("utf-8")
