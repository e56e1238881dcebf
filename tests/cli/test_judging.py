"""``sheepop eval judge``: models answer, a server judges over HTTP, and what was judged is not asked again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sheepop.evaluate.report import read_report

from ..judge_server import judge_server

Run = Callable[..., Any]


@pytest.fixture
def judge() -> Iterator[tuple[str, list[str], list[str]]]:
    with judge_server() as server:
        yield server


def test_a_judge_that_prefers_a_place_finds_no_winner(
    run: Run, trained: Path, tmp_path: Path, judge: tuple[str, list[str], list[str]]
) -> None:
    url, asked, first = judge
    other, prompts = tmp_path / "other", tmp_path / "prompts.jsonl"
    shutil.copytree(trained, other)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Sheep", "Once upon", "a b c")))
    place = ("eval", "judge", trained, other, "--data", prompts, "--by", url, "--judge-model", "j", "--workers", "1")
    given = (*place, "--max-new-tokens", "8", "--output", tmp_path / "out", "--device", "cpu")
    first += ["nonsense", "more nonsense", "[[A]]", "[[A]]", "[[A]]", "refuse"]
    assert run(*given, "--quiet").code == 0
    assert len(asked) == 7  # one question was put again
    (one, two) = read_report(tmp_path / "out")
    measures = {measure.name: measure.value for measure in one.evaluations[0].measures}
    assert measures["win_rate"] == 0.5
    assert measures["position_bias"] == 1.0
    assert measures["unreadable_rate"] == pytest.approx(2 / 3)
    assert two.evaluations[0].measure("win_rate").value == 0.5
    assert not list(tmp_path.glob("*.verdicts.jsonl"))


def test_an_interrupted_judgement_goes_on(
    run: Run, trained: Path, tmp_path: Path, judge: tuple[str, list[str], list[str]]
) -> None:
    url, asked, first = judge
    other, prompts = tmp_path / "other", tmp_path / "prompts.jsonl"
    shutil.copytree(trained, other)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Sheep", "Once upon")))
    place = ("eval", "judge", trained, other, "--data", prompts, "--by", url, "--judge-model", "j", "--workers", "1")
    given = (*place, "--max-new-tokens", "8", "--output", tmp_path / "out", "--device", "cpu", "--quiet")
    first += ["[[A]]", "[[A]]", "denied"]
    ended = run(*given)
    assert ended.code == 3 and "answered 401" in ended.err
    (kept,) = tmp_path.glob("out.*.verdicts.jsonl")
    with kept.open("a") as file:
        file.write('{"id": "2", "fir')  # as a kill leaves it
    assert run(*given).code == 0
    assert len(asked) == 3 + 2  # the first pair is known
    assert read_report(tmp_path / "out")[0].evaluations[0].measure("position_bias").value == 1.0
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{one}", "--by", "http://127.0.0.1:9"], "at least two models"),
        (["{one}", "{one}", "--by", "http://127.0.0.1:9"], "is given twice"),
        (["{one}", "{two}", "--by", "{one}", "--judge-model", "x"], "are only for a judge on a server"),
        (["{one}", "{two}", "--by", "{one}"], "chat template"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    run: Run, trained: Path, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    shutil.copytree(trained, tmp_path / "two")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    given = [argument.format(one=trained, two=tmp_path / "two") for argument in arguments]
    ended = run("eval", "judge", *given, "--data", tmp_path / "p.jsonl", "--max-new-tokens", "2", "--device", "cpu",
                "--output", tmp_path / "out")  # fmt: skip
    assert ended.code != 0 and complaint in ended.err, ended.err
    assert not (tmp_path / "out").exists()


def test_a_judge_says_what_answers_to_requests_do(
    run: Run, trained: Path, tmp_path: Path, judge: tuple[str, list[str], list[str]]
) -> None:
    url, asked, _ = judge
    requests = tmp_path / "requests.jsonl"
    rows = [{"prompt": "Sheep", "should": "answer"}, {"prompt": "Once upon", "should": "refuse"}]
    requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("eval", "tasks", trained, "--tasks", requests, "--no-record", "--device", "cpu", "--quiet")
    ended = run(*given, "--output", tmp_path / "without")
    assert ended.code == 2 and "sheepop eval tasks --by" in ended.err
    ended = run(*given, "--output", tmp_path / "without", "--judge-model", "j")
    assert ended.code == 2 and "--judge-model needs a judge" in ended.err
    judged = run(*given, "--output", tmp_path / "out", "--by", url, "--judge-model", "j")
    assert judged.code == 0, judged.err
    assert len(asked) == 2 and "Sheep" in asked[0] + asked[1]
    (found,) = read_report(tmp_path / "out")[0].evaluations
    assert {measure.name: measure.value for measure in found.measures} == {
        "conduct": 0.5, "refusal": 0.0, "needless_refusal": 0.0, "needless_abstention": 0.0,
    }  # fmt: skip
