"""``sheepop eval``: scores, reports and records of models on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_source import resolve_model_directory
from sheepop.core.files import damaged_files
from sheepop.data import Corpus
from sheepop.evaluate.contamination import shares_in_training
from sheepop.evaluate.report import read_report

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def models(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs, one the copy of the other, that may be written to."""
    place = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copytree(trained, place / name)
    return place / "one", place / "two"


@pytest.fixture(scope="module")
def report(run: Run, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("evaluations") / "text"
    ended = run("eval", "perplexity", models[0], "--output", output, "--device", "cpu")
    assert ended.code == 0, ended.err
    assert "bits_per_byte" in ended.out and f"Report: {output / 'report.html'}" in ended.err
    return output


def test_the_score_of_a_run_is_that_of_its_training(run: Run, report: Path, models: tuple[Path, Path]) -> None:
    rows = [json.loads(line) for line in (models[0] / "metrics.jsonl").read_text().splitlines()]
    (score,) = [row for row in rows if row["split"] == "score"]
    (found,) = read_report(report)
    measured = found.evaluations[0]
    # The same tokens, but in the run's rows a window may begin within a document.
    assert measured.measure("bits_per_byte").value == pytest.approx(score["bits_per_byte"], rel=0.02)
    assert measured.measure("loss").count == score["tokens"]
    beside = {row[0]: row[1] for row in measured.tables[0].rows}
    assert list(beside) == ["this model", "xz -9 that has read the training text", "xz -9", "gzip -9"]
    assert {path.name for path in report.iterdir()} == {
        "report.html", "report.json", "items.jsonl", "plots", "checksums.json"
    }  # fmt: skip
    assert not damaged_files(report)


def test_scores_are_recorded_with_the_model(report: Path, models: tuple[Path, Path]) -> None:
    directory = resolve_model_directory(models[0])
    stated = json.loads((directory / "provenance.json").read_text())["evaluations"]
    (bits,) = [each for each in stated if each["kind"] == "perplexity" and each["measure"] == "bits_per_byte"]
    assert bits["value"] == read_report(report)[0].evaluations[0].measure("bits_per_byte").value
    assert "bits_per_byte" in (directory / "README.md").read_text()
    assert not damaged_files(directory)
    assert sheepop.load(models[0], device="cpu").generate("a", max_new_tokens=2).token_ids


def test_tasks_compare_models_and_leave_them_alone_when_asked(
    run: Run, models: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus = Corpus.open(RunDirectory(models[0]).corpus)
    known = next(document.text for document in corpus.documents("train") if len(document.text.split()) > 14)
    rows = [
        {"id": "dirty", "prompt": " ".join(known.split()[:14]), "choices": [" a", " b"], "answer": 0},
        {
            "id": "clean",
            "prompt": "one two three four five six seven eight nine ten",
            "choices": ["a", "b"],
            "answer": 1,
        },
    ]
    questions = tmp_path / "mine.jsonl"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    before = (resolve_model_directory(models[1]) / "provenance.json").read_bytes()
    ended = run(
        "eval", "tasks", *models, "--tasks", "copying", "--tasks", questions, "--limit", "20", "--robustness",
        "--seeds", "2", "--no-record", "--output", tmp_path / "out", "--json", "--device", "cpu",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert len(found["models"]) == 2
    copying, mine = found["models"][str(models[0])]
    assert [measure["name"] for measure in copying["measures"]][-1] == "steadiness"
    assert copying["tables"][0]["title"] == "By seed" and len(copying["tables"][0]["rows"]) == 2
    contamination = mine["tables"][-1]
    assert contamination["title"].startswith("Contamination by") and [row[1] for row in contamination["rows"]] == [2, 2]
    shares = shares_in_training(
        {row["id"]: row["prompt"] for row in rows},
        (document.text for document in corpus.documents("train")),  # type: ignore[misc]
    )
    assert shares["dirty"] == 1 and shares["clean"] == 0
    assert {each["difference"]["p"] for each in found["compared"]} == {1.0}  # one model is a copy of the other
    assert (resolve_model_directory(models[1]) / "provenance.json").read_bytes() == before


def test_reports_are_compared_without_asking_again(
    run: Run, report: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    assert run("eval", "perplexity", models[1], "--output", tmp_path / "two", "--no-record", "--quiet").code == 0
    ended = run("eval", "compare", report, tmp_path / "two", "--output", tmp_path / "both")
    assert ended.code == 0, ended.err
    assert f"held-out text, bits_per_byte: {models[0]} minus {models[1]} is 0 (0 to 0), p = 1" in ended.out
    assert "no difference beyond chance" in ended.out
    page = (tmp_path / "both/report.html").read_text()
    assert "Compared item by item" in page


def test_every_checkpoint_of_a_run(run: Run, models: tuple[Path, Path], tmp_path: Path) -> None:
    steps = RunDirectory(models[0]).steps()
    options = ("--tasks", "brackets", "--limit", "10", "--checkpoints", "--no-record", "--output", tmp_path / "out")
    ended = run("eval", "tasks", models[0], *options, "--device", "cpu")
    assert ended.code == 0, ended.err
    found = read_report(tmp_path / "out")
    assert [result.about["step"] for result in found] == steps
    assert json.loads((tmp_path / "out/report.json").read_text())["compared"] == []
    drawn = "Checkpoint by checkpoint" in (tmp_path / "out/report.html").read_text()
    assert drawn == (len(steps) > 2)


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["perplexity", "{one}", "{one}"], "is given twice", 2),
        (["perplexity", "{one}", "--output", "{one}"], "already exists", 2),
        (["perplexity", "{one}", "--data", "{one}/nothing"], "does not exist", 3),
        (["perplexity", "{one}", "--stride", "10000"], "at most the window of 32 tokens", 2),
        (["perplexity", "{one}", "--context", "10000"], "at most the model's context", 2),
        (["perplexity", "{one}", "--data", "{weights}"], "is not UTF-8 text", 3),
        (["tasks", "{directory}", "--checkpoints"], "is not a run", 2),
        (["tasks", "{one}", "--tasks", "none.jsonl"], "neither a file of questions", 2),
        (["tasks", "{one}", "--chat-template-kwargs", "{{}}"], "--chat-template-kwargs needs --chat", 2),
        (["tasks", "{one}", "--chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs", 2),
        (["compare", "{one}"], "Give two models or more", 2),
        (["tasks", "{one}/nothing"], "does not exist", 3),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    run: Run, models: tuple[Path, Path], tmp_path: Path, arguments: list[str], complaint: str, code: int
) -> None:
    directory = resolve_model_directory(models[0])
    places = {"one": models[0], "directory": directory, "weights": directory / "model.safetensors"}
    given = [argument.format(**places) for argument in arguments]
    output = [] if "--output" in given else ["--output", str(tmp_path / "out")]
    ended = run("eval", *given, *output)
    assert (ended.code, complaint in ended.err) == (code, True), ended.err
    assert not (tmp_path / "out").exists()
