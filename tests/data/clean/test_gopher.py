from __future__ import annotations

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

from sheepop.data.clean.config import GopherConfig, RepetitionConfig
from sheepop.data.clean.quality import gopher_quality, repeated_lines, repeated_runs
from sheepop.data.clean.stage import Removal
from sheepop.data.clean.words import tokens_of, tokens_of_all

SENTENCE = "The cat sat with a friend of mine and they had to talk about that for some time. "
PROSE = "".join(
    f"In the year {year} the people of the town had to think of what they would do with water and wood number {year}. "
    for year in range(1900, 1912)
)


def reason(verdict: bool | tuple[bool, str]) -> str | None:
    return verdict[1] if isinstance(verdict, tuple) else None


def quality(text: str) -> Removal | None:
    return gopher_quality(text, tokens_of(text), GopherConfig())


@pytest.mark.parametrize(
    ("text", "theirs", "ours", "detail"),
    [
        (SENTENCE, "gopher_short_doc", "gopher length", "18 words, fewer than 50"),
        (
            "a b of to " * 40,
            "gopher_below_avg_threshold",
            "gopher word length",
            "1.50 letters on average, fewer than 3",
        ),
        (
            "incomprehensibility of the counterrevolutionaries " * 40,
            "gopher_above_avg_threshold",
            "gopher word length",
            "more than 10",
        ),
        (SENTENCE * 4 + "# " * 20, "gopher_too_many_hashes", "gopher symbols", "hash signs per word, more than 0.1"),
        (SENTENCE * 4 + "well... " * 20, "gopher_too_many_ellipsis", "gopher symbols", "ellipses per word"),
        (f"- {SENTENCE}\n" * 8, "gopher_too_many_bullets", "gopher bullets", "100% of the lines begin with a bullet"),
        (
            f"{SENTENCE.strip()[:-1]} and more of it...\n" * 4,
            "gopher_too_many_end_ellipsis",
            "gopher ellipses",
            "100% of the lines end in an ellipsis, more than 30%",
        ),
        (SENTENCE * 4 + "1234 " * 40, "gopher_below_alpha_threshold", "gopher letters", "of the words have a letter"),
        (
            "Les enfants mangent une pomme rouge dans le grand jardin fleuri pendant longtemps " * 6,
            "gopher_enough_stop_words",
            "gopher stop words",
            "0 of the most frequent English words, fewer than 2",
        ),
    ],
)
def test_every_quality_rule_removes_what_datatrove_removes(text: str, theirs: str, ours: str, detail: str):
    assert reason(GopherQualityFilter().filter(Document(text, "0"))) == theirs
    removal = quality(text)
    assert removal is not None
    assert removal.reason == ours
    assert removal.detail.startswith("gopher: ")
    assert detail in removal.detail


def test_plain_english_passes():
    assert GopherQualityFilter().filter(Document(PROSE, "0")) is True
    assert quality(PROSE) is None


def test_a_text_of_nothing_passes_where_no_length_is_asked_for():
    assert gopher_quality("", tokens_of(""), GopherConfig(min_words=0)) is None


def repetition(text: str) -> Removal | None:
    config = RepetitionConfig()
    return repeated_lines(text, config) or repeated_runs([text], [tokens_of(text)], config)[0]


PARAGRAPHS = PROSE.replace(". ", ".\n\n")


@pytest.mark.parametrize(
    ("text", "theirs", "detail"),
    [
        ("", "empty", "no text"),
        ("a\n\na\n\na\n\nb\n\nc", "dup_para_frac", "40.0% of the paragraphs are repeated, more than 30%"),
        (f"{PROSE}\n\nshort\n\n{PROSE}\n\nlast\n\nx", "dup_para_char_frac", "repeated paragraphs make up 49"),
        ("a\na\na\nb\n\n" + "long line " * 9, "dup_line_frac", "40.0% of the lines are repeated"),
        (f"1\n2\n3\n4\n{PROSE}\n5\n{PROSE}\nlast", "dup_line_char_frac", "repeated lines make up 49"),
        (
            "ring bell " * 9 + "of the tall house in town and more",
            "top_2_gram",
            "one run of 2 words makes up 65.3% of the text, more than 20%",
        ),
        (f"{PROSE}{PROSE}", "duplicated_5_n_grams", "repeated runs of 5 words make up"),
    ],
)
def test_every_repetition_rule_removes_what_datatrove_removes(text: str, theirs: str, detail: str):
    assert reason(GopherRepetitionFilter().filter(Document(text, "0"))) == theirs
    removal = repetition(text)
    assert removal is not None
    assert removal.reason == "gopher repetition"
    assert detail in removal.detail


def test_what_is_not_repeated_passes():
    text = " ".join(f"word{number} and then{number}" for number in range(300))
    assert GopherRepetitionFilter().filter(Document(text, "0")) is True
    assert repetition(text) is None


def test_both_filters_judge_documentation_as_datatrove_does(prose: list[str]):
    config = RepetitionConfig()
    tokens = tokens_of_all(prose)
    lines = [repeated_lines(text, config) for text in prose]
    runs = repeated_runs(prose, tokens, config)
    for step, ours in (
        (GopherQualityFilter(), [gopher_quality(t, its, GopherConfig()) for t, its in zip(prose, tokens, strict=True)]),
        (GopherRepetitionFilter(), [first or second for first, second in zip(lines, runs, strict=True)]),
    ):
        kept = [step.filter(Document(text, "0")) is True for text in prose]
        assert min(sum(kept), len(kept) - sum(kept)) >= 20
        same = sum((removal is None) == stays for removal, stays in zip(ours, kept, strict=True))
        assert same >= 0.98 * len(prose)


def test_one_word_is_not_many():
    removal = quality("word")
    assert removal is not None
    assert removal.detail == "gopher: 1 word, fewer than 50"
