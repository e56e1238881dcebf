from __future__ import annotations

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter

from sheepop.data.clean.config import C4Config
from sheepop.data.clean.quality import KeptLines, kept_lines, num_sentences
from sheepop.data.clean.stage import Removal

LINE = "This is a line of five words or more."


def theirs(text: str) -> tuple[str | None, str]:
    """Datatrove's reason, None when it keeps the document, and the text it leaves."""
    document = Document(text, "0")
    verdict = C4QualityFilter().filter(document)
    return (verdict[1] if isinstance(verdict, tuple) else None), document.text


@pytest.mark.parametrize(
    ("text", "reason", "ours"),
    [
        (f"{LINE}\n" * 4, "too_few_sentences", "c4: 4 sentences in lines that end like one, fewer than 5"),
        (f"{LINE}\nLorem ipsum is what it says.\n" * 6, "lorem_ipsum", "c4: dummy text, lorem ipsum"),
        (f"{LINE}\nThe body {{ is here }} now.\n" * 6, "curly_bracket", "c4: a curly bracket in a sentence"),
    ],
)
def test_a_document_goes_for_datatroves_reason(text: str, reason: str, ours: str):
    assert theirs(text)[0] == reason
    removal = kept_lines(text, C4Config())
    assert isinstance(removal, Removal)
    assert removal.detail == ours


@pytest.mark.parametrize(
    "line",
    [
        "No full stop at the end",
        "Too short.",
        "It ends in dots and so on...",
        "Please switch on JavaScript to see this page.",
        "By using it you accept our terms of use here.",
        "We say in our cookie policy what we do.",
        f"A word that is {'very' * 260} long indeed.",
        "A citation[12] and another[citation needed] go away.",
        '  Indented and "quoted, as they say."',
        "Just a heading [edit]",
        "Was it a question of yours?",
        "A { in a line that does not count",
    ],
)
def test_lines_are_kept_as_datatrove_keeps_them(line: str):
    text = f"{LINE}\n" * 5 + f"{line}\n{LINE}"
    reason, left = theirs(text)
    assert reason is None
    kept = kept_lines(text, C4Config())
    assert isinstance(kept, KeptLines)
    assert kept.text == left


@pytest.mark.parametrize(
    "line",
    [
        "One. Two. Three.",
        "Is it? Yes! It is.",
        'He said "stop." Then she left.',
        "See e.g. the list, i.e. all of it.",
        "Version 3.11 of the U.S. edition costs 5.00 here.",
        "J. R. R. Tolkien wrote a book. It is long.",
        "Wait... what is this. And that!",
        "(In brackets.) Outside of them.",
    ],
)
def test_sentences_are_counted_as_datatrove_counts_them(line: str):
    from datatrove.utils.text import split_into_sentences

    assert num_sentences([line], 100) == len(split_into_sentences(line))


def test_documentation_is_judged_and_shortened_as_datatrove_does_it(prose: list[str]):
    same = num_kept = 0
    for text in prose:
        reason, left = theirs(text)
        ours = kept_lines(text, C4Config())
        num_kept += reason is None
        same += isinstance(ours, Removal) == (reason is not None)
        if reason is None and isinstance(ours, KeptLines):
            assert ours.text == left
    assert 20 <= num_kept <= len(prose) - 20
    assert same >= 0.98 * len(prose)


def test_marks_move_to_the_first_kept_line_that_ends_after_them():
    pages = [f"Heading\n{LINE}\n", "Nothing here\n", f"Another\n{LINE}\nlast words of it\n{LINE}\n"]
    text = "".join(pages)
    marks = [(0, "1"), (len(pages[0]), "2"), (len(pages[0] + pages[1]), "3")]
    kept = kept_lines(text, C4Config(min_sentences=1))
    assert isinstance(kept, KeptLines)
    assert kept.lines == [LINE] * 3
    assert kept.moved(text, marks) == [(0, "1"), (len(LINE) + 1, "2"), (len(LINE) + 1, "3")]
    assert kept.moved(text, [(len(text), "end")]) == [(len(kept.text), "end")]


def test_words_may_be_bounded_tighter_than_a_line():
    kept = kept_lines(
        "These are short words here.\nThese incomprehensible words are not.",
        C4Config(max_word_length=8, min_sentences=1),
    )
    assert isinstance(kept, KeptLines)
    assert kept.lines == ["These are short words here."]


def test_a_line_of_a_million_marks_is_counted():
    assert num_sentences(["a" + "." * 1_000_000 + " b" + "!'" * 300_000], 5) in (1, 2, 3)
