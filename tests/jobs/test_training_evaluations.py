"""Questions that a model is asked while it trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import ConfigError
from sheepop.core.json_lines import read_json_lines
from sheepop.evaluate import harness
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.harness import ask_tasks, load_tasks
from sheepop.evaluate.perplexity import Text, evaluate_perplexity
from sheepop.evaluate.questions import questions_of
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.run.record import RunRecord, view_run_config
from sheepop.jobs.run.report import write_run_report
from sheepop.jobs.task.evaluations import EvaluationSet

from ..running import train

STEPS = (
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.checkpoint_interval=1",
    "training.max_steps=4",
    "evaluation.tasks=[copying]",
    "evaluation.questions=12",
    "evaluation.interval=2",
)


def rows(run: Path) -> list[dict[str, object]]:
    found = [row for row in read_json_lines(run / "metrics.jsonl")[0] if row["split"] == "evaluation"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_scores_are_those_of_the_checkpoints(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    config = configured(tmp_path / "run", *STEPS)
    run = RunDirectory.open(train(config).run)
    assert [row["step"] for row in rows(run.path)] == [2, 4]
    for row in rows(run.path):
        loaded = load_model(run.checkpoint(int(str(row["step"]))))
        asked = questions_of("copying", 12, config.seed, None)
        expected = evaluate_choices(Generator(loaded.model, loaded.tokenizer), "copying", asked)
        for measure in expected.measures:
            assert row[f"copying/{measure.name}"] == pytest.approx(measure.value, abs=1e-6)
        stated = [score for score in loaded.provenance["evaluations"] if score["kind"] == "tasks"]
        assert [score["value"] for score in stated] == [row[f"copying/{measure.name}"] for measure in expected.measures]
        assert {score["step"] for score in stated} == {row["step"]}
        (name,) = {score["name"] for score in loaded.provenance["evaluations"] if score["kind"] == "validation"}
        assert re.fullmatch(r"held out, [\d,]+ tokens", name)  # a sample is told by its size
    between = json.loads((run.checkpoint(3) / "provenance.json").read_text())["evaluations"]
    assert {score["step"] for score in between if score["kind"] == "tasks"} == {2}


def test_a_resumed_run_has_the_same_scores(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    train(configured(tmp_path / "whole", *STEPS))
    train(configured(tmp_path / "run", *STEPS, "training.max_steps=3"))
    stored = find_resumable(tmp_path / "run")
    assert stored is not None
    train(load_config(overrides=["training.max_steps=4"], base=stored.record.requested), resume=True)
    assert rows(tmp_path / "run")[-1] == rows(tmp_path / "whole")[-1]
    whole, resumed = (
        place / "checkpoints/step-00000004/provenance.json" for place in (tmp_path / "whole", tmp_path / "run")
    )
    assert json.loads(whole.read_text())["evaluations"] == json.loads(resumed.read_text())["evaluations"]


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("coping", "evaluation: There is no task coping"),
        ("coping.jsonl", "evaluation: coping.jsonl is neither a file of questions nor one of the tasks copying, brack"),
        ("cloze", "evaluation: The task cloze asks for words of the text"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_step(
    configured: Callable[..., SheepOpConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    complaint: str,
) -> None:
    # The thousands of files that lm-eval brings are read for a test in tests/evaluate.
    monkeypatch.setattr(harness, "_bundled", dict)
    settings = ("data.validation_fraction=0", f"evaluation.tasks=[{task}]")
    with pytest.raises(ConfigError, match=complaint):
        train(configured(tmp_path / "run", *STEPS, *settings))
    assert not (tmp_path / "run").exists()


def test_texts_and_tasks_of_lm_eval_are_asked_too(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"sheep {n}", "c": ["a", "b"]}) + "\n" for n in range(9))
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/letters.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\n'
        "doc_to_target: 0\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "other.txt").write_text("Once there were sheep. " * 5)
    settings = (f"evaluation.include=[{tmp_path}/tasks]", f"evaluation.texts=[{tmp_path}/other.txt]")
    run = train(configured(tmp_path / "run", *STEPS, "evaluation.tasks=[letters]", *settings)).run
    last = rows(run)[-1]
    loaded = load_model(RunDirectory(run).checkpoint(4))
    generator = Generator(loaded.model, loaded.tokenizer)
    (letters,) = ask_tasks(generator, load_tasks(["letters"], include=[tmp_path / "tasks"]))
    expected = evaluate_perplexity(generator, [Text("other.txt", (tmp_path / "other.txt").read_text())])
    final = json.loads((RunDirectory(run).checkpoint(4) / "provenance.json").read_text())["evaluations"]
    assert {score["name"] for score in final if score["kind"] != "validation"} == {"letters", "other.txt"}
    assert last["letters/acc"] == letters.measure("acc").value
    assert last["other.txt/bits_per_byte"] == pytest.approx(expected.measure("bits_per_byte").value, rel=1e-5)


def test_models_that_answer_nothing_are_not_asked(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    for settings, complaint in (
        ("model.architecture=encoder_decoder", "an encoder-decoder writes targets"),
        ("tuning.method=reward", "a reward model judges answers"),
    ):
        with pytest.raises(ConfigError, match=f"evaluation: {complaint}"):
            EvaluationSet.load(configured(tmp_path / "run", *STEPS, settings), None)


def test_the_report_has_a_curve_for_every_measure(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    outcome = train(configured(tmp_path / "run", *STEPS, "evaluation.tasks=[copying,brackets]"))
    run = RunDirectory.open(outcome.run)
    write_run_report(run, view_run_config(run), outcome.scores, RunRecord.read(run), {})
    page = run.report.read_text()
    for measure in ("accuracy", "bits of the answer", "calibration error"):
        assert f"What it can do: {measure}" in page
    assert '"name":"brackets"' in page


def test_files_of_the_same_name_in_two_folders_are_both_asked(
    configured: Callable[..., SheepOpConfig], tmp_path: Path
) -> None:
    for folder, answers in (("a", ["x", "y"]), ("b", ["y", "x"])):
        (tmp_path / folder).mkdir()
        question = {"prompt": "letter", "choices": answers, "answer": 0}
        (tmp_path / folder / "quiz.jsonl").write_text(json.dumps(question) + "\n")
        (tmp_path / folder / "same.txt").write_text(f"Once there was {folder}. " * 9)
    both = {name: [f"{tmp_path}/{folder}/{name}" for folder in "ab"] for name in ("quiz.jsonl", "same.txt")}
    settings = [
        f"evaluation.tasks=[{','.join(both['quiz.jsonl'])}]",
        f"evaluation.texts=[{','.join(both['same.txt'])}]",
    ]
    found = EvaluationSet.load(configured(tmp_path / "run", *STEPS, *settings), None)
    assert list(found.questions) == both["quiz.jsonl"] and list(found.texts) == both["same.txt"]
    alone = EvaluationSet.load(
        configured(tmp_path / "run", *STEPS, f"evaluation.tasks=[{both['quiz.jsonl'][0]}]"), None
    )
    assert list(alone.questions) == ["quiz"]


def test_what_is_asked_is_loaded_once(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = EvaluationSet.load, []

    def counted(*arguments: Any) -> EvaluationSet:
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(EvaluationSet, "load", counted)
    train(configured(tmp_path / "run", *STEPS))
    assert len(loads) == 1
