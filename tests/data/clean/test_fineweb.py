from __future__ import annotations

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter

from sheepop.data.clean.config import FineWebConfig
from sheepop.data.clean.quality import fineweb_quality

LONG = "This line has more than thirty characters in it, number {}.\n"
GOOD = "".join(LONG.format(number) for number in range(20))


@pytest.mark.parametrize(
    ("text", "theirs", "ours"),
    [
        (" \n\n", "empty", "fineweb: no text"),
        (GOOD.replace(".", ","), "line_punct_ratio", "0.0% of the lines end in a punctuation mark, less than 12%"),
        (
            "A short one.\n" + "".join(f"Short {n}.\n" for n in range(9)),
            "short_line_ratio",
            "100.0% of the lines have 30",
        ),
        (GOOD + LONG.format(3), "char_dup_ratio", "repeated lines make up 4.7% of the text, more than 1%"),
        (GOOD + "\n" * 200, "list_ratio", "line breaks per word, more than 0.3"),
    ],
)
def test_every_rule_removes_what_datatrove_removes(text: str, theirs: str, ours: str):
    assert FineWebQualityFilter().filter(Document(text, "0")) == (False, theirs)
    removal = fineweb_quality(text, FineWebConfig())
    assert removal is not None
    assert ours in removal.detail


def test_whole_sentences_pass():
    assert FineWebQualityFilter().filter(Document(GOOD, "0")) is True
    assert fineweb_quality(GOOD, FineWebConfig()) is None


def test_documentation_is_judged_as_datatrove_judges_it(prose: list[str]):
    theirs = [FineWebQualityFilter().filter(Document(text, "0")) is True for text in prose]
    ours = [fineweb_quality(text, FineWebConfig()) is None for text in prose]
    assert 20 <= sum(theirs) <= len(prose) - 20
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 0.995 * len(prose)
