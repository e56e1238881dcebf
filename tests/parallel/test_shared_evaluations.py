"""Evaluations by several processes: the scores that one process finds."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sheepop.evaluate.report import read_report
from sheepop.evaluate.results import Evaluation

from ..command_line import Ended
from ..faults.conftest import DISTURBED
from ..judge_server import judge_server
from .conftest import Together, rows


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of a judge, who says that each answer answers."""
    with judge_server() as (url, *_):
        yield url


@pytest.fixture(scope="module")
def asked(judge: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that ask for choices, for texts that are written, and for a task of lm-eval."""
    pytest.importorskip("lm_eval")
    place = tmp_path_factory.mktemp("asked")
    freely = [{"prompt": f"Sheep number {number}", "should": "answer"} for number in range(5)]
    (place / "freely.jsonl").write_text("".join(json.dumps(each) + "\n" for each in freely))
    letters = [{"q": f"sheep {number} ", "c": ["jumps", "fence", "r"]} for number in range(7)]
    (place / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in letters))
    (place / "letters.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {place}/rows.jsonl}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\n'
        "doc_to_target: 0\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    tasks = ["copying", "letters", str(place / "freely.jsonl")]
    named = [word for task in tasks for word in ("--tasks", task)]
    return ["tasks", *named, "--include", str(place), "--limit", "9", "--by", judge, "--judge-model", "j"]


@pytest.fixture(scope="module")
def found_alone(
    together: Together, alone: Path, asked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[Evaluation]:
    """What one process finds."""
    output = tmp_path_factory.mktemp("found") / "out"
    done = together.alone(command(asked, alone, output))
    assert done.code == 0, done.err
    return evaluations(output)


def command(asked: list[str], model: Path, output: Path) -> list[str]:
    return ["eval", *asked, str(model), "--output", str(output), "--no-record", "--device", "cpu", "--json"]


def evaluations(output: Path) -> list[Evaluation]:
    (result,) = read_report(output)
    return list(result.evaluations)


def require_equal(ours: Any, theirs: Any) -> None:
    """The same texts, choices and counts; other numbers within rounding."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert [measure.name for measure in one.measures] == [measure.name for measure in other.measures]
        for a, b in zip(one.measures, other.measures, strict=True):
            assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-6), a.name
            assert a.count == b.count
        assert [item.id for item in one.items] == [item.id for item in other.items]
        for a, b in zip(one.items, other.items, strict=True):
            assert a.values == pytest.approx(b.values, rel=1e-4, abs=1e-5)
            for name, value in a.shown.items():
                if name == "logprobs":
                    assert value == pytest.approx(b.shown[name], rel=1e-4)
                elif not isinstance(value, float):
                    assert value == b.shown[name], name


def one_voice(ends: list[Ended]) -> str:
    (first, second) = ends
    assert first.code == second.code == 0, ends
    assert not second.out and not second.err
    return first.out


def test_two_ranks_find_what_one_process_finds(
    together: Together, alone: Path, asked: list[str], found_alone: list[Evaluation], tmp_path: Path
) -> None:
    ends = together.run(2, command(asked, alone, tmp_path / "tasks"))
    assert str(tmp_path / "tasks") in one_voice(list(ends))
    require_equal(evaluations(tmp_path / "tasks"), found_alone)
    predicted = ["perplexity", "--data", str(together.text)]
    ends = together.run(2, command(predicted, alone, tmp_path / "text"))
    assert str(tmp_path / "text") in one_voice(list(ends))
    assert together.alone(command(predicted, alone, tmp_path / "one")).code == 0
    require_equal(evaluations(tmp_path / "text"), evaluations(tmp_path / "one"))


def test_a_model_in_parts_is_asked_as_a_whole_one(
    together: Together, alone: Path, asked: list[str], found_alone: list[Evaluation], tmp_path: Path
) -> None:
    done = together.alone([*command(asked, alone, tmp_path / "out"), "--tensor-parallel", "2"])
    assert done.code == 0, done.err
    require_equal(evaluations(tmp_path / "out"), found_alone)


def test_an_error_is_said_once_and_a_signal_to_one_rank_ends_all(
    together: Together, alone: Path, tmp_path: Path
) -> None:
    ends = together.run(2, command(["perplexity", "--data", str(tmp_path / "none")], alone, tmp_path / "out"))
    assert [end.code for end in ends] == [3, 3], ends
    assert sum("does not exist" in end.err for end in ends) == 1
    assert sum(bool(end.err) for end in ends) == 1
    (tmp_path / "long.txt").write_text("Sheep number 7 jumps over the fence.\n" * 20000)
    options = command(["perplexity", "--data", str(tmp_path / "long.txt")], alone, tmp_path / "out")
    end = [
        "signal.raise_signal(signal.SIGTERM)",
        "sheepop.evaluate.likelihood",
        "LikelihoodScorer.score",
        "3",
        *options,
    ]
    ranks = together.start(2, options, program_1=DISTURBED, rank_1=end)
    ends = [rank.wait() for rank in ranks]
    assert [end.code for end in ends] == [128 + signal.SIGTERM] * 2, ends
    assert sum("Terminated" in end.err for end in ends) == 1, ends
    assert not (tmp_path / "out").exists()


def test_ranks_that_train_share_what_the_model_is_asked(together: Together, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Once there were sheep.\n" * 9)
    settings = ["evaluation.tasks=[copying]", f"evaluation.texts=[{tmp_path}/other.txt]", "evaluation.questions=9"]
    settings += ["training.max_steps=4", "evaluation.interval=2"]
    assert together.alone(together.options(tmp_path / "one", *settings)).code == 0
    ends = together.run(2, together.options(tmp_path / "two", *settings, "parallel.zero=3"))
    assert [end.code for end in ends] == [0, 0], ends
    one, two = ([row for row in rows(tmp_path / name) if row["split"] == "evaluation"] for name in ("one", "two"))
    assert [row["step"] for row in one] == [2, 4]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys() and len(a) > 8
        for name in a.keys() - {"seconds", "split"}:
            assert b[name] == pytest.approx(a[name], rel=1e-3), name
