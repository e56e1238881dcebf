"""Comparisons item by item, and reports that are read back as they were written."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import pytest

from sheepop.core.errors import DataError, SheepOpError
from sheepop.evaluate.report import ModelResults, read_report, write_report
from sheepop.evaluate.results import Evaluation, Item, Measure, Table, compare, over_seeds
from sheepop.evaluate.statistics import reliability

HOSTILE = "</script><img src=x onerror=alert(1)>"


def evaluation(name: str, values: list[float], weights: list[float] | None = None, **more: object) -> Evaluation:
    weights = weights or [1.0] * len(values)
    items = [
        Item(f"item-{number}", {"score": value}, weight, {"prompt": f"{HOSTILE} {number}"})
        for number, (value, weight) in enumerate(zip(values, weights, strict=True))
    ]
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    measures = [Measure("score", mean, "What it scored.", len(values), (mean - 0.1, mean + 0.1))]
    return Evaluation("tasks", name, measures, items, **more)  # type: ignore[arg-type]


def test_right_and_wrong_is_tested_exactly_and_everything_else_by_resampling() -> None:
    ours, theirs = [1.0] * 9 + [0.0] * 3, [1.0, 1.0] + [0.0] * 10
    (found,) = compare("a", [evaluation("t", ours)], "b", [evaluation("t", theirs)])
    assert (found.test, found.difference.value) == ("McNemar, exact", pytest.approx(7 / 12))
    assert found.difference.p == pytest.approx(2 * 0.5**7)  # seven items that only one has right, all on one side
    assert found.better == "a"
    (found,) = compare("a", [evaluation("t", ours, [2.0] * 12)], "b", [evaluation("t", theirs)])
    assert found.test == "paired bootstrap"
    assert found.difference.value == pytest.approx(7 / 12)


def test_a_measure_where_less_is_better_has_the_other_winner() -> None:
    ours, theirs = evaluation("t", [0.1 * n for n in range(30)]), evaluation("t", [0.1 * n + 1 for n in range(30)])
    (found,) = compare("a", [ours], "b", [theirs])
    assert found.better == "b"
    less = [
        Evaluation(e.kind, e.name, [Measure("score", 0.0, "Less is better.", 30, None, False)], e.items)
        for e in (ours, theirs)
    ]
    (found,) = compare("a", [less[0]], "b", [less[1]])
    assert found.better == "a"


def test_models_that_were_asked_something_else_are_not_compared() -> None:
    with pytest.raises(DataError, match="1 belong to only one of them"):
        compare("a", [evaluation("t", [1.0, 0.0])], "b", [evaluation("t", [1.0])])
    assert compare("a", [evaluation("t", [1.0])], "b", [evaluation("u", [1.0])]) == []


def test_a_report_is_read_back_as_it_was(tmp_path: Path) -> None:
    first = evaluation(
        f"skills {HOSTILE}",
        [1.0, 0.0, 1.0],
        tables=[Table("By length", ("Length", "Score"), [["short", 0.5], [HOSTILE, None]])],
        notes=[HOSTILE],
        settings={"seed": 3},
        reliability=reliability([0.9, 0.4, 0.7], [True, False, True]),
    )
    results = [ModelResults("a", [first], {"step": 3}), ModelResults("b", [first], {})]
    compared = compare("a", [first], "b", [first])
    write_report(tmp_path / "out", results, compared, {"command": HOSTILE})
    again = read_report(tmp_path / "out")
    assert [result.model for result in again] == ["a", "b"]
    assert again[0].evaluations[0].items == first.items
    assert again[0].evaluations[0].measures == first.measures
    assert again[0].evaluations[0].reliability == first.reliability
    page = (tmp_path / "out/report.html").read_text()
    assert HOSTILE not in page and HOSTILE in unescape(page)
    assert "What it scored." in page and "Compared item by item" in page
    assert len(list((tmp_path / "out/plots").glob("*.png"))) == 2
    with pytest.raises(SheepOpError):
        write_report(tmp_path / "out", results, compared, {})


def test_a_course_of_checkpoints_is_drawn(tmp_path: Path) -> None:
    results = [
        ModelResults(f"run step {n}", [evaluation("t", [n / 3, 0.0])], {"step": n, "run": "run"}) for n in (2, 1, 3)
    ]
    write_report(tmp_path / "out", results, [], {})
    page = (tmp_path / "out/report.html").read_text()
    assert "Checkpoint by checkpoint" in page and '"x":[1,2,3]' in page


@pytest.mark.parametrize("damage", ["report", "items", "format", "version"])
def test_a_damaged_report_is_refused(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "out"
    write_report(place, [ModelResults("a", [evaluation("t", [1.0])], {})], [], {})
    report = json.loads((place / "report.json").read_text())
    if damage == "report":
        (place / "report.json").write_text("{")
    elif damage == "items":
        (place / "items.jsonl").write_text("[]\n")
    else:
        key, value = ("format", "other") if damage == "format" else ("format_version", 99)
        (place / "report.json").write_text(json.dumps({**report, key: value}))
    with pytest.raises(SheepOpError):
        read_report(place)


def test_seeds_are_averaged_with_students_interval() -> None:
    found = over_seeds([evaluation("t", [1.0, 0.0]), evaluation("t", [1.0, 1.0]), evaluation("t", [0.0, 0.0])])
    measure = found.measure("score")
    assert (measure.value, measure.count) == (pytest.approx(0.5), 6)
    assert measure.interval == pytest.approx((0.5 - 4.302653 * 0.5 / 3**0.5, 0.5 + 4.302653 * 0.5 / 3**0.5), abs=1e-5)
    assert len({item.id for item in found.items}) == 6
    assert [row[1] for row in found.tables[0].rows] == [0.5, 1.0, 0.0]
    assert over_seeds([found]) is found
