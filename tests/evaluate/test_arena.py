"""Votes of an arena: the standings are those of a count by hand, and a line that is none is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import DataError
from sheepop.evaluate.ranking import Outcome, rank, read_votes


def line(number: int, vote: str, *models: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "Hi?", "vote": vote, "models": list(models), "round": f"r{number}", **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "votes.jsonl"


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_standings_are_those_of_a_count_by_hand(file: Path) -> None:
    votes = ["left", "left", "left", "tie", "neither"]  # north is on the left: 3 wins and 2 ties
    votes_turned = ["right", "left"]  # and here on the right: 1 win, 1 loss
    rows = [line(number, vote, "north", "south") for number, vote in enumerate(votes)]
    rows += [line(number, vote, "south", "north") for number, vote in enumerate(votes_turned, 5)]
    write(file, *rows, {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_model": "north"}, "\n")
    first, second = rank(read_votes(file))
    assert (first.name, first.games, first.win_rate) == ("north", 7, 5 / 7)
    assert (second.name, second.games, second.win_rate) == ("south", 7, 2 / 7)
    # A pair that met has half a draw more.
    assert first.strength - second.strength == pytest.approx(400 * math.log10((5 + 0.25) / (2 + 0.25)))
    assert first.interval[0] < first.strength < first.interval[1]


def test_a_vote_scores_for_the_model_on_its_side(file: Path) -> None:
    write(file, *(line(number, vote, "a", "b") for number, vote in enumerate(("left", "right", "tie", "neither"))))
    assert read_votes(file) == [Outcome("a", "b", score) for score in (1.0, 0.0, 0.5, 0.5)]


def test_models_that_never_met_are_not_ranked(file: Path) -> None:
    write(file, line(1, "left", "a", "b"), line(2, "left", "c", "d"))
    with pytest.raises(DataError, match="a, b and c, d were never compared"):
        rank(read_votes(file))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{\n", "line 2: not valid JSON"),
        ("[1]\n", "line 2: not a JSON object"),
        ({"prompt": "a"}, 'line 2: "vote" must be one of left, right, tie, neither, not None'),
        (line(2, "up", "a", "b"), "not 'up'"),
        ({**line(2, "tie", "a", "b"), "vote": ["tie"]}, r"not \['tie'\]"),
        (line(2, "tie", "a"), 'line 2: "models" must be the names of two models'),
        ({**line(2, "tie", "a", "b"), "models": "ab"}, "not 'ab'"),
        ({**line(2, "tie", "a", "b"), "models": ["a", 7]}, "line 2"),
        (line(2, "tie", "a", "a"), "line 2: 'a' is compared with itself"),
        ({**line(2, "tie", "a", "b"), "round": None}, 'line 2: "round" must be'),
        (line(1, "tie", "a", "b"), "line 2: the vote of this round is on line 1 already"),
    ],
)
def test_a_line_that_is_no_vote_is_named(file: Path, bad: Any, problem: str) -> None:
    write(file, line(1, "left", "a", "b"), bad)
    with pytest.raises(DataError, match=problem) as caught:
        read_votes(file)
    assert str(file) in str(caught.value)


def test_a_file_without_blind_votes_says_how_to_make_some(file: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        rank(read_votes(file))
    write(file, {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(DataError, match=r"has no votes of an arena.*sheepop eval arena"):
        rank(read_votes(file))
