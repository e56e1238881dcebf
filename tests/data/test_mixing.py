from __future__ import annotations

import pytest
from pydantic import ValidationError

from sheepop.core.errors import DataError
from sheepop.data import DataConfig
from sheepop.data.mixing import MixedSource, Mixture, copies


def mixture(*sources: tuple[str, float], weights: bool = False) -> Mixture:
    key = "weight" if weights else "epochs"
    return Mixture([MixedSource.model_validate({"pattern": pattern, key: value}) for pattern, value in sources])


def test_a_file_belongs_to_the_first_source_whose_pattern_matches() -> None:
    found = mixture(("wiki/", 1), ("*.py", 2), ("*", 3))
    names = ["wiki/a.txt", "wiki/tool.py", "src/tool.py", "notes.md"]
    assert [found.number(name) for name in names] == [0, 0, 1, 2]
    assert mixture(("wiki/", 1)).number("book.txt") == -1


def test_weights_are_shares_of_a_text_that_stays_as_long() -> None:
    # 300 and 100 bytes asked in equal shares: 200 each of the 400 there are.
    assert mixture(("a/", 5), ("b/", 5), weights=True).epochs([300, 100], 0) == pytest.approx([2 / 3, 2.0])
    assert mixture(("a/", 3), ("b/", 1), weights=True).epochs([300, 100], 0) == pytest.approx([1.0, 1.0])


def test_epochs_stand_as_given() -> None:
    assert mixture(("a/", 2.5), ("b/", 0)).epochs([300, 0], 70) == [2.5, 0.0]


def test_a_source_without_text_is_named() -> None:
    with pytest.raises(DataError, match="no training text matches 'b/'"):
        mixture(("a/", 1), ("b/", 1)).epochs([10, 0], 0)


def test_shares_cannot_be_had_when_some_text_belongs_to_no_source() -> None:
    with pytest.raises(DataError, match="70 bytes of text match no pattern"):
        mixture(("a/", 1), weights=True).epochs([10], 70)


@pytest.mark.parametrize("settings", [{}, {"epochs": 1, "weight": 1}, {"epochs": -1}, {"weight": 0}])
def test_a_source_has_either_epochs_or_a_weight(settings: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        MixedSource.model_validate({"pattern": "*", **settings})


def test_epochs_and_weights_do_not_mix() -> None:
    with pytest.raises(ValueError, match="use one of the two for all"):
        DataConfig(mix=(MixedSource(pattern="a", epochs=1), MixedSource(pattern="b", weight=1)))


@pytest.mark.parametrize("pattern", ["!", "[z-a]"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid \.gitignore pattern"):
        MixedSource(pattern=pattern, epochs=1)


def test_a_fraction_is_a_keyed_choice_of_about_that_share() -> None:
    ids = [f"{number:032x}" for number in range(20_000)]
    counts = [copies(1.25, 7, identity) for identity in ids]
    assert set(counts) == {1, 2}
    assert sum(counts) / len(counts) == pytest.approx(1.25, abs=0.02)  # three standard errors are 0.009
    assert counts == [copies(1.25, 7, identity) for identity in ids]
    assert counts != [copies(1.25, 8, identity) for identity in ids]
    assert {copies(3.0, 7, identity) for identity in ids[:100]} == {3}
    assert {copies(0.0, 7, identity) for identity in ids[:100]} == {0}
