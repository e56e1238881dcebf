from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean.account import Account
from sheepop.data.clean.config import FormattingConfig
from sheepop.data.clean.formatting import Formatting, pieces, repaired
from sheepop.data.documents import Draft

Make = Callable[..., Draft]
TEXT = "naïve café “quoted” – it’s £5 €7 Überraschung Привет мир 日本語 😀 à la carte Å œuvre ﬁne"
CODECS = ("latin-1", "cp1252", "cp1250", "cp1251", "mac-roman", "cp437", "cp1253", "cp1257")


def formatted(item: Draft, **settings: Any) -> tuple[str | None, dict[str, int]]:
    """The text that is left of the document, None when nothing is, and what was changed how often."""
    account = Account(0)
    left = list(Formatting(account, FormattingConfig(**settings)).run([item]))
    return (left[0].text if left else None), dict(account.stage("formatting").changes)


@pytest.fixture
def text_of(document: Make) -> Callable[..., str | None]:
    return lambda text, kind="prose", **settings: formatted(document(text, kind), **settings)[0]


# Wrong decoding


def by_ftfy(text: str) -> str:
    from ftfy import TextFixerConfig, fix_text

    settings = {"unescape_html": False, "fix_character_width": False, "uncurl_quotes": False, "normalization": None}
    return fix_text(text, TextFixerConfig(**settings, max_decode_length=100_000))


@st.composite
def wrongly_decoded(draw: st.DrawFn) -> str:
    text = " ".join(draw(st.lists(st.sampled_from(TEXT.split()), min_size=1, max_size=6)))
    for _ in range(draw(st.integers(1, 2))):
        text = text.encode().decode(draw(st.sampled_from(CODECS)), "replace")
    if draw(st.booleans()):
        text = text.replace("\xa0", " ")
    return f"{text}\n{draw(st.sampled_from(TEXT.split()))} {text[: draw(st.integers(0, 9))]}"


ODD = st.text(
    st.sampled_from("ÃÂâ€™œ œ\x80\x9d\xa0éÉ«»“”¬¦вЂіГРС×²√‰ﬁŉ\u2028\ufeff\u200b\x1b[0m\ud83d\r\n\tabZ .,à²ØÙ°"),
    max_size=14,
)


@given(st.one_of(wrongly_decoded(), ODD))
def test_repairing_suspect_lines_gives_what_ftfy_gives_for_the_whole_text(text: str):
    assert repaired(text)[0] == by_ftfy(text)


def test_text_in_many_scripts_is_not_taken_for_wrongly_decoded(text_of: Callable[..., str]):
    text = (
        "Привет, мир! Γειά σου. नमस्ते שלום مرحبا 日本語のテキスト。ｆｕｌｌ ｗｉｄｔｈ　“Curly” quotes’ and &amp; stay."
    )
    assert text_of(text) == text == by_ftfy(text)


def test_wrong_decoding_is_undone_and_counted(document: Make):
    text, counts = formatted(document("The cafÃ© â€œopensâ€\x9d at nine.\nIt is fine.\nVoilÃ \xa0!\x07\n"))
    assert text == "The café “opens” at nine.\nIt is fine.\nVoilà  !\n"
    assert counts == {"wrong decoding": 1, "unwanted characters": 1, "no-break spaces": 1}


# Characters and white space


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n", {"line ends": 2}),
        ("a  \nb\t\n \n c", "a\nb\n\n c", {"lines with blanks at the end": 3}),
        ("a\n\n\n\n\nb\n\n\nc", "a\n\n\nb\n\n\nc", {"runs of blank lines": 1}),
        ("a\xa0b\n\xa0\xa0c\xa0d", "a b\n\xa0\xa0c d", {"no-break spaces": 2}),
        ("\ufeffa\u200bb\u2060c co\u00adop", "abc coop", {"unwanted characters": 1, "zero-width characters": 3}),
        ("e\u0301 and o\u0308", "é and ö", {"composed characters": 2}),
        ("the \ufb01rst \ufb02oor", "the first floor", {"unwanted characters": 1}),
        ("red \x1b[31malert\x1b[0m now", "red alert now", {"unwanted characters": 1}),
        ("a\x00b\x08c\x0cd\x7f", "abc\x0cd", {"unwanted characters": 1}),
        ("a\tb\t c  d", "a\tb\t c  d", {}),
    ],
)
def test_what_does_not_belong_in_text_is_repaired_and_counted(
    document: Make, before: str, after: str, change: dict[str, int]
):
    assert formatted(document(before)) == (after, change)


@pytest.mark.parametrize("text", ["\u0e01\u200b\u0e02", "\u06af\u200c\u06af", "👩\u200d👩\u200d👧", "syl\u00ad\nlable"])
def test_marks_without_width_stay_where_they_mean_something(text_of: Callable[..., str], text: str):
    assert text_of(text) == text


def test_an_empty_cell_at_the_end_of_a_row_stays(text_of: Callable[..., str]):
    assert text_of("a\tb\t\nc\t\t\nd  \n", "table") == "a\tb\t\nc\t\t\nd\n"


def test_code_is_left_alone_byte_for_byte(document: Make):
    text = "\ufeffdef f():\r\n\treturn 'cafÃ©\xa0'  \n\n\n\n\n\x0c# e\u0301\x00\u200b\n"
    assert formatted(document(text, "code")) == (text, {})


def test_each_kind_of_repair_can_be_turned_off(text_of: Callable[..., str]):
    text = "cafÃ©  \ne\u0301\r\n"
    assert text_of(text, decoding=False) == "cafÃ©\né\n"
    assert text_of(text, normalize=False) == "café\ne\u0301\n"
    assert text_of(text, decoding=False, normalize=False, whitespace=False) == text
    assert text_of("a\n\n\nb", max_blank_lines=0) == "a\nb"


def test_a_document_of_marks_without_width_is_removed_as_empty(document: Make):
    account = Account(0)
    assert list(Formatting(account, FormattingConfig()).run([document("\ufeff\u2060 \n")])) == []
    assert account.stage("formatting").removed == {"empty": 1}


def test_marks_still_stand_where_their_pages_begin(document: Make):
    pages = ["First page.  \r\n", "Second cafÃ©.\n\n\n\n\n", "\ufeffThird."]
    marks = [(0, "1"), (len(pages[0]), "2"), (len(pages[0] + pages[1]), "3")]
    item = document("".join(pages), marks=marks)
    text, _ = formatted(item)
    assert text == "First page.\nSecond café.\n\n\nThird."
    assert [(text[offset : offset + 5], name) for offset, name in item.marks] == [
        ("First", "1"),
        ("Secon", "2"),
        ("Third", "3"),
    ]


@given(st.text(st.sampled_from("ab \t\n-`>.:é\xa0\u200b"), max_size=80))
def test_white_space_at_the_beginning_of_lines_is_never_touched(text: str):
    text = unicodedata.normalize("NFC", text)
    changed, _ = Formatting(Account(0), FormattingConfig()).changed(text, Draft(text, "a", 0))

    def indents(lines: str) -> list[str]:
        # What is left of a line that holds nothing but marks is no indentation.
        visible = [line for line in lines.replace("\u200b", "").split("\n")[:-1] if line.strip()]
        return [re.match(r"[ \t\xa0]*", line).group() for line in visible]

    assert indents(changed) == indents(text)


# Verbatim blocks

MARKDOWN = """Some text here.

```python
x = 1  \n\n\n\n
caf\u00c3\u00a9 = "\xa0"  # kept
```

1. An item

    with more of it.

Then:

    indented\xa0code  \n
        deeper  \n
Text again.
"""
RST = """Title
=====

This is shown::

   a\xa0b  \n
     c\xa0d

.. note:: this\xa0is prose

   and so\xa0is this.

.. code-block:: c
   :linenos:

   int\xa0x;  \n
>>> f(1)\xa0
2\xa0

The end\xa0of it.
"""
LATEX = "Text\xa0one.\n\\begin{verbatim}\nx\xa0y  \n\\end{verbatim}\nText\xa0two.\n"


@pytest.mark.parametrize("text", [MARKDOWN, RST, LATEX])
def test_blocks_of_code_in_prose_are_left_alone_and_the_rest_is_not(text_of: Callable[..., str], text: str):
    changed = text_of(text)
    kept = [part for part, is_verbatim in pieces(text) if is_verbatim]
    assert "".join(part for part, _ in pieces(text)) == text
    assert kept
    assert all(part in changed for part in kept)
    prose = "".join(part for part, is_verbatim in pieces(text) if not is_verbatim)
    assert "\xa0" not in changed.replace("\xa0", "", "".join(kept).count("\xa0"))
    assert "verbatim}" in changed or not re.search(r"int|x = 1|café|>>>", prose)


def test_what_is_verbatim_is_what_a_reader_would_call_code():
    found = {
        name: [part.split("\n")[0] for part, is_verbatim in pieces(text) if is_verbatim]
        for name, text in (("markdown", MARKDOWN), ("rst", RST), ("latex", LATEX))
    }
    assert found == {
        "markdown": ["```python", "    indented\xa0code  "],
        "rst": ["", "   :linenos:", ">>> f(1)\xa0"],
        "latex": ["\\begin{verbatim}"],
    }


@given(st.text(st.sampled_from("ab \t\n-`~>.:*1"), max_size=120))
def test_pieces_together_are_the_text(text: str):
    assert "".join(part for part, _ in pieces(text)) == text
