"""What a text is made of, against counting one character after another."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean.garbage import CharacterCounts, characters_in_long_lines, encoded_characters

ASCII = "".join(map(chr, range(128)))
OTHER = "\x80\x85\x9f\xa0é٣ª中🙂\ue000\uf8ff\ufffd\ufffe\uffff\U0001ffff\ud800\u2003"


def has_no_form(character: str) -> bool:
    if unicodedata.category(character) == "Cc":
        return not character.isspace()
    is_no_character = ord(character) & 0xFFFE == 0xFFFE
    return character == "\ufffd" or is_no_character or "\ue000" <= character < "\uf900"


def counted(text: str) -> CharacterCounts:
    return CharacterCounts(
        characters=len(text),
        visible=sum(not character.isspace() for character in text),
        letters=sum(character.isalpha() for character in text),
        digits=sum(character in "0123456789" for character in text),
        unprintable=sum(has_no_form(character) for character in text),
    )


@pytest.mark.parametrize("repeated", [1, 100], ids=["short", "long"])
@given(text=st.text(st.sampled_from(ASCII + OTHER)) | st.text(st.sampled_from(ASCII)))
def test_characters_are_counted(repeated: int, text: str) -> None:
    text = text * repeated
    assert CharacterCounts.of(text) == counted(text)


@pytest.mark.parametrize("text", [ASCII, ASCII * 40, (ASCII + OTHER) * 40])
def test_every_character_is_counted(text: str) -> None:
    assert CharacterCounts.of(text) == counted(text)


def test_words_of_encoded_data_are_counted() -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    assert encoded_characters(f'checksum = "{digest}",\n  {digest}') == 2 * 64
    assert encoded_characters(digest[:59]) == 0  # too short to be told from a name
    assert encoded_characters("1" * 80) == 0  # a rule of digits
    assert encoded_characters("https://example.org/" + "path/" * 20) == 0


def test_characters_in_lines_beyond_a_thousand_are_counted() -> None:
    assert characters_in_long_lines(["a" * 1000, "b" * 1001, "c" * 5000]) == 6001
