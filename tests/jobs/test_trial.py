"""A trial of advice: both runs continue from one checkpoint, read the same rows, and are compared on the same rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.console import Console
from sheepop.core.errors import DataError, TrainingError, UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.evaluate.statistics import Difference
from sheepop.interpret.control.advice import BATCH, LAYER, RATE, SCORES, Advice, advice_of
from sheepop.jobs.advice import advise
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.branch import write_branch
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.run.record import StoredRun, view_run_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train as resumed
from sheepop.jobs.trial import Arm, Trial, advised_settings, try_advice

from ..running import train
from ..train.runs import TIMING

SETTINGS = (
    *("analysis.quantities=[sharpness]", "analysis.interval=1", "analysis.rows=4", "training.log_batch_hash=true"),
    *("training.checkpoint_interval=2", "training.keep_checkpoints=9", "training.log_interval=1", "model.dropout=0.1"),
)
LATE = (  # a rate that leaps behind step 3
    *("training.warmup_steps=null", "training.schedule=piecewise", "training.learning_rate=3"),
    "training.schedule_points=[[0,0.0001],[3,0.0001],[4,1.0]]",
)


@pytest.fixture(scope="module")
def leaping(configured: Callable[..., SheepOpConfig], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("leaping")
    return RunDirectory.open(train(configured(folder / "run", *SETTINGS, *LATE)).run)


def stored_run(run: RunDirectory) -> StoredRun:
    found = find_resumable(run.path)
    assert found is not None
    return found


def rows_of(run: Path, split: str) -> list[dict[str, Any]]:
    rows = read_json_lines(run / "metrics.jsonl").rows
    return [{key: row[key] for key in row if key not in TIMING} for row in rows if row["split"] == split]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(load_model(RunDirectory(run).checkpoint(step)).model.named_parameters())


def tried(run: RunDirectory, advice: Advice) -> Trial:
    return try_advice(run.path, stored_run(run), advice, overwrite=True, console=Console.silent())


def test_advice_is_tried_from_the_checkpoint_before_its_evidence(leaping: RunDirectory, tmp_path: Path) -> None:
    found = advise(leaping.path, output=tmp_path / "out", tries=True)
    assert found.advice[0].cause in (RATE, LAYER) and found.advice[0].step > 2
    trial = found.trial
    assert trial is not None and (trial.begin, trial.end, trial.why) == ((found.advice[0].step - 1) // 2 * 2, 6, None)
    assert trial.as_it_was.run == leaping.path
    was, advised = (rows_of(run, "train") for run in (leaping.path, trial.as_advised.run))
    assert [row["batch_hash"] for row in was] == [row["batch_hash"] for row in advised]
    assert was[: trial.begin] == advised[: trial.begin]
    factor = found.advice[0].changes["training.learning_rate"]
    rates = [[row["learning_rate"] for row in rows] for rows in (was, advised)]
    assert rates[1][trial.begin :] == pytest.approx([factor * rate for rate in rates[0][trial.begin :]], rel=0.01)
    # The run's own validation after the last step is another way to the loss of each.
    for arm in (trial.as_it_was, trial.as_advised):
        assert arm.loss == pytest.approx(rows_of(arm.run, "validation")[-1]["loss"], rel=1e-5)
    assert trial.difference is not None
    low, high = trial.difference.interval
    assert low <= trial.difference.value <= high
    assert trial.difference.value == pytest.approx(trial.as_advised.loss - trial.as_it_was.loss)  # type: ignore[operator]
    assert found.sentences()[-1].startswith("The advice helped: the held-out loss is lower by ")
    stored = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert json.loads(RunDirectory(trial.as_advised.run).advice.read_text()) == stored
    assert stored["trial"]["begin"] == trial.begin and stored["trial"]["difference"]["count"] > 1


def test_a_branch_without_changes_is_the_run_itself(leaping: RunDirectory, tmp_path: Path) -> None:
    with RunDirectory.starting(tmp_path / "run") as target:
        write_branch(stored_run(leaping), leaping, 2, {}, target)
    resumed(RunRequest({"output_dir": str(target.path)}, resume=True, must_resume=True, uses_recipe=False))
    for split in ("train", "analysis", "validation", "score"):
        assert rows_of(target.path, split) == rows_of(leaping.path, split)
    again = weights_of(target.path, 6)
    for name, weight in weights_of(leaping.path, 6).items():
        assert torch.equal(weight, again[name]), name
    assert [row["step"] for row in json.loads(target.record_file.read_text())["resumed"]] == [2]


def test_a_larger_batch_reads_the_rows_that_follow(leaping: RunDirectory) -> None:
    trial = tried(leaping, Advice(BATCH, 3, "", {"training.global_batch_size": 8}))
    assert trial.begin == 2 and trial.settings == {"training.global_batch_size": 8}
    training = view_run_config(RunDirectory(trial.as_advised.run)).training
    assert (training.batch_size_warmup, training.global_batch_size) == (((2, 4),), 8)
    was, advised = (rows_of(run, "train") for run in (leaping.path, trial.as_advised.run))
    tokens = [[row["tokens"] for row in rows] for rows in (was, advised)]
    assert tokens[0][:2] == tokens[1][:2] and tokens[1][2:4] == tokens[0][3::2]
    assert "with more rows in each step as advised" in trial.sentences()[0]


def test_without_a_checkpoint_before_the_evidence_both_begin_at_step_0(leaping: RunDirectory) -> None:
    trial = tried(leaping, Advice(RATE, 1, "", {"training.learning_rate": 0.5}))
    assert (trial.begin, trial.as_it_was.run) == (0, leaping.path)
    assert (
        trial.sentences()[0] == "The run has no checkpoint from before step 1 with the state of its optimizer, so both "
        "runs start from the beginning."
    )
    was, advised = (rows_of(run, "train") for run in (leaping.path, trial.as_advised.run))
    assert [row["batch_hash"] for row in was] == [row["batch_hash"] for row in advised]
    assert was[0]["loss"] == advised[0]["loss"]
    other = tried(leaping, Advice(SCORES, 5, "", {"model.qk_norm": "head"}))
    assert other.begin == 0 and "model.qk_norm changes the network" in other.sentences()[0]
    assert view_run_config(RunDirectory(other.as_advised.run)).model.qk_norm == "head"


def test_a_run_that_was_stopped_is_continued_as_it_was(
    configured: Callable[..., SheepOpConfig], leaping: RunDirectory, tmp_path: Path
) -> None:
    """Early stopping ends this run after step 2; both runs of the trial go on to step 6 without it."""
    early = ("training.early_stopping=1", "training.early_stopping_delta=100", "training.eval_interval=1")
    run = RunDirectory.open(train(configured(tmp_path / "run", *SETTINGS, *LATE, *early)).run)
    assert run.steps() == [1, 2]
    trial = tried(run, Advice(LAYER, 3, "", {"training.layers": [{"pattern": "blocks.0.*", "learning_rate": 0.3}]}))
    assert trial.as_it_was.run == tmp_path / "run-as-it-was"
    assert [row["loss"] for row in rows_of(trial.as_it_was.run, "train")] == [
        row["loss"] for row in rows_of(leaping.path, "train")
    ]
    assert (trial.begin, trial.end) == (2, 6)


def test_a_run_that_fails_loses_against_one_that_does_not(
    configured: Callable[..., SheepOpConfig], tmp_path: Path
) -> None:
    """A rate of 1e30 makes weights whose loss is not finite."""
    leap = (*LATE[:2], "training.learning_rate=1e30", "training.schedule_points=[[0,1e-33],[3,1e-33],[4,1.0]]")
    stops = ("training.trouble.non_finite=stop", "analysis.quantities=[]", "training.max_grad_norm=null")
    with pytest.raises(TrainingError):
        train(configured(tmp_path / "run", *SETTINGS, *leap, *stops))
    trial = tried(RunDirectory(tmp_path / "run"), Advice(RATE, 3, "", {"training.learning_rate": 1e-30}))
    assert trial.difference is None and trial.as_it_was.loss is None and trial.as_advised.loss is not None
    assert trial.sentences()[-2].startswith("The run as it was fails: Step 6 gave ")
    assert trial.sentences()[-1] == "The advice helped: the run as advised reaches its end."


def test_a_run_without_a_finite_loss_has_diverged(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    """The step with the rate 1e30 is the fifth; the sixth one is skipped, and the run reaches its end."""
    leap = (*LATE[:2], "training.learning_rate=1e30", "training.schedule_points=[[0,1e-33],[3,1e-33],[4,1.0]]")
    run = train(configured(tmp_path / "run", *SETTINGS, *leap, "analysis.quantities=[]", "training.max_grad_norm=null"))
    cure = Advice(RATE, 3, "", {"training.learning_rate": 1e-30})
    trial = tried(RunDirectory(run.run), cure)
    assert (trial.as_it_was.run, trial.as_it_was.loss, trial.difference) == (run.run, None, None)
    assert trial.as_advised.loss == pytest.approx(rows_of(trial.as_advised.run, "validation")[-1]["loss"], rel=1e-5)
    assert trial.sentences()[-2:] == [
        "The run as it was fails: It diverged. Since step 6 its loss is not finite.",
        "The advice helped: the run as advised reaches its end.",
    ]
    harm = tried(RunDirectory(trial.as_advised.run), Advice(RATE, 3, "", {"training.learning_rate": 1e30}))
    assert harm.sentences()[-2:] == [
        "The run as advised fails: It diverged. Since step 6 its loss is not finite.",
        "The advice did not help.",
    ]


def test_a_checkpoint_without_the_state_of_its_optimizer_is_passed_over(leaping: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(leaping.path, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    advice = Advice(RATE, 5, "", {"training.learning_rate": 0.5})
    older = [step for step in run.steps() if step < advice.step]
    shutil.rmtree(run.checkpoint(older.pop()) / "state")
    assert tried(run, advice).begin == older[-1]
    for step in older:
        shutil.rmtree(run.checkpoint(step) / "state")
    trial = tried(run, advice)
    assert trial.begin == 0
    assert trial.why == "The run has no checkpoint from before step 5 with the state of its optimizer"


def test_changed_data_and_an_old_trial_are_refused(
    configured: Callable[..., SheepOpConfig], text_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for file in text_folder.iterdir():
        if file.is_file():
            (data / file.name).write_bytes(file.read_bytes())
    run = RunDirectory.open(train(configured(tmp_path / "run", "training.max_steps=1", data=data)).run)
    (data / "more.txt").write_text("Other words. " * 50)
    advice = Advice(RATE, 1, "", {"training.learning_rate": 0.5})
    with pytest.raises(DataError, match="have changed since it began"):
        tried(run, advice)
    assert not (tmp_path / "run-advised").exists()
    (tmp_path / "run-advised" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="already holds a run"):
        try_advice(run.path, stored_run(run), advice, overwrite=False, console=Console.silent())


def test_the_trial_in_the_documents_has_the_words_of_the_program() -> None:
    """The numbers are those of docs/control.md."""
    usual = {"split": "analysis", "sharpness": 3024.05, "sharpness_limit": 188.1, "sharpness_certain": 2.0}
    place = {"sharpest": "embedding", "sharpest_share": 0.657, "sharpest_at": "embedding.weight"}
    measured = ((20, 0.2, 16.077), (40, 0.2998, 58.85), (60, 0.2981, 62.47), (80, 0.2946, 45.66), (100, 0.2893, 0.817))
    rows = [
        {"step": step, "learning_rate": rate, "sharpness_share": share, "turning_factor": 1.4, **usual, **place}
        for step, rate, share in measured
    ]
    (advice,) = advice_of([{**row, "sharpest_at_share": 0.657} for row in rows])
    why = "The run has no checkpoint from before step 20 with the state of its optimizer"
    difference = Difference(-1.4180, (-1.4898, -1.3521), 0.0005, 118)
    arms = Arm(Path("runs/fast"), 3.3712), Arm(Path("runs/fast-advised"), 1.9531)
    trial = Trial({"training.learning_rate": 0.00937}, 0, 600, why, *arms, difference)
    page = " ".join((Path(__file__).parents[2] / "docs" / "control.md").read_text(encoding="utf-8").split())
    for sentence in (advice.words, *trial.sentences()):
        assert sentence in page


def test_advised_settings_fit_the_run() -> None:
    config = SheepOpConfig().replace(training={"global_batch_size": 12, "micro_batch_size": 6})
    advice = Advice(BATCH, 1, "", {"training.global_batch_size": 64})
    assert advised_settings(config, advice) == {"training.global_batch_size": 66}
    entries = [{"pattern": name, "learning_rate": 0.3} for name in ("a", "b")]
    config = SheepOpConfig().replace(training={"layers": entries[1:]})
    (first, second) = advised_settings(config, Advice(LAYER, 1, "", {"training.layers": entries[:1]}))[
        "training.layers"
    ]
    assert first == entries[0] and second["pattern"] == "b"
