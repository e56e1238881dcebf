"""The analysis of a run: it changes no weight, survives a resume, and is refused where it cannot measure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.errors import CheckpointError, ConfigError, OutputError, UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.config import AnalysisConfig
from sheepop.interpret.control.watching import cost_in_steps, measuring_interval
from sheepop.jobs.advice import advise
from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, noise_of, reopen, sharpness_of
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.run.open import find_resumable

from ..running import train
from ..train.runs import TIMING

ALL = "analysis.quantities=[sharpness,noise,layers]"
SETTINGS = ("training.warmup_steps=1", "training.schedule=constant", "training.checkpoint_interval=2")
OFTEN = (ALL, "analysis.interval=2")


@pytest.fixture(scope="module")
def analysed(configured: Callable[..., SheepOpConfig], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Six steps, each second one measured."""
    folder = tmp_path_factory.mktemp("analysed")
    return RunDirectory.open(train(configured(folder / "run", *SETTINGS, *OFTEN)).run)


def rows_of(run: RunDirectory, split: str) -> list[dict[str, Any]]:
    rows = read_json_lines(run.metrics_file).rows
    return [{key: row[key] for key in row if key not in TIMING} for row in rows if row["split"] == split]


def weights_of(run: RunDirectory) -> dict[str, torch.Tensor]:
    return dict(load_model(run.checkpoint(run.steps()[-1])).model.named_parameters())


def test_a_watched_run_has_the_same_weights_and_losses(
    configured: Callable[..., SheepOpConfig], analysed: RunDirectory, tmp_path: Path
) -> None:
    plain = RunDirectory.open(train(configured(tmp_path / "run", *SETTINGS)).run)
    assert [row["step"] for row in rows_of(analysed, "analysis")] == [2, 4, 6]
    assert rows_of(plain, "analysis") == []
    assert rows_of(plain, "train") == rows_of(analysed, "train")
    assert rows_of(plain, "validation") == rows_of(analysed, "validation")
    found = weights_of(analysed)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weight, found[name]), name


def test_a_network_with_tables_of_ngrams_is_measured_without_them(
    configured: Callable[..., SheepOpConfig], tmp_path: Path
) -> None:
    settings = ("model.ngrams.rows=64", "training.max_steps=2", "training.checkpoint_interval=2", *OFTEN)
    run = RunDirectory.open(train(configured(tmp_path / "run", *settings)).run)
    (row,) = rows_of(run, "analysis")
    assert row["gradient_noise"] > 0 and row["sharpness_limit"] > 0
    found = analyze_run(RunAnalysisRequest(run.path, device="cpu"), "noise", lambda run: noise_of(run, batches=2))
    assert "Tables of n-grams are kept fixed: ngrams.table" in found.notes[1]


def test_a_resumed_run_measures_the_same(
    configured: Callable[..., SheepOpConfig], analysed: RunDirectory, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    train(configured(place, *SETTINGS, *OFTEN, "training.max_steps=3"))
    stored = find_resumable(place)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    assert rows_of(RunDirectory.open(place), "analysis") == rows_of(analysed, "analysis")


def test_a_row_agrees_with_the_analysis_of_the_checkpoint(analysed: RunDirectory) -> None:
    """Both measure after step 4 with the state of the optimizer after it; the row does so on the batch of step 4."""
    (row,) = [row for row in rows_of(analysed, "analysis") if row["step"] == 4]
    found = analyze_run(RunAnalysisRequest(analysed.path, step=4, device="cpu"), "sharpness", sharpness_of)
    assert found.sharpness.limit == pytest.approx(row["sharpness_limit"])
    assert found.sharpness.share == pytest.approx(row["sharpness_share"], rel=0.5)  # other rows
    assert found.rate == 1e-3 and found.step == 4
    assert set(found.ratios) >= {"blocks.0.attention.q_proj.weight", "embedding.weight"}


def test_the_loss_along_a_path_is_that_of_the_weights_between_two_checkpoints(
    configured: Callable[..., SheepOpConfig], tmp_path: Path
) -> None:
    """A twentieth of 200 steps are 10. The last path goes from the checkpoint of step 190 to that of step 200."""
    settings = ("training.max_steps=200", "training.checkpoint_interval=10", "training.eval_interval=200")
    often = ("analysis.quantities=[sharpness]", "analysis.interval=5", "analysis.rows=2")
    run = RunDirectory.open(train(configured(tmp_path / "run", *SETTINGS[:2], *settings, *often)).run)
    rows = rows_of(run, "analysis")
    assert [row["step"] for row in rows if "loss_behind" in row] == list(range(10, 201, 10))
    stopped = reopen(RunAnalysisRequest(run.path, step=190, device="cpu"), "sharpness")
    batch = stopped.parts.source.prepare(stopped.state.batch_number + 9).micro_batches[0]
    begin, end = (load_model(run.checkpoint(step)).model.double().eval() for step in (190, 200))

    def loss(place: float) -> float:
        model = copy.deepcopy(begin)
        with torch.no_grad():
            for weight, last in zip(model.parameters(), end.parameters(), strict=True):
                weight += place * (last - weight)
            inputs = {name: rows[:2] for name, rows in batch.inputs.items()}
            logits = model.read_out(model.hidden_states(**inputs)).flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, batch.labels[:2].flatten()))

    assert rows[-1]["loss_behind"] == pytest.approx(loss(0.5) - loss(1.0), abs=1e-5)
    assert rows[-1]["loss_ahead"] == pytest.approx(loss(1.5) - loss(1.0), abs=1e-5)


def test_sharpness_is_proportional_to_the_rate(analysed: RunDirectory) -> None:
    def share(rate: float | None) -> float:
        request = RunAnalysisRequest(analysed.path, step=4, learning_rate=rate, device="cpu")
        return analyze_run(request, "sharpness", sharpness_of).sharpness.share

    assert share(2e-3) == pytest.approx(2 * share(None), rel=0.01)


def test_noise_is_measured_and_written_once(analysed: RunDirectory, tmp_path: Path) -> None:
    request = RunAnalysisRequest(analysed.path, tmp_path / "out", device="cpu")
    found = analyze_run(request, "noise", lambda run: noise_of(run, batches=3))
    assert len(found.samples) == 3 and found.batch_rows == 4
    assert (tmp_path / "out" / "noise.json").is_file()
    with pytest.raises(OutputError, match="already exists"):
        analyze_run(request, "noise", noise_of)


def test_python_measures_what_the_commands_do(analysed: RunDirectory) -> None:
    run = sheepop.analyze(analysed.path, device="cpu")
    (row,) = [row for row in rows_of(analysed, "analysis") if row["step"] == 4]
    assert run.sharpness(step=4).sharpness.limit == pytest.approx(row["sharpness_limit"])
    assert len(run.noise(batches=3).samples) == 3
    assert run.coordinates(widths=(8, 16, 32), steps=1).widths == (8, 16, 32)
    advice = run.advice()
    assert advice.table() == [] and advice.sentences() == ["The analysis of this run gives no advice."]


def test_the_report_shows_the_curve(analysed: RunDirectory) -> None:
    assert "Sharpness of the loss against what the optimizer bears" in analysed.report.read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("training.optimizer=lion",), "The limit of training.optimizer = lion is not known"),
        (("model.experts.count=2",), "experts have no second derivative"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run_starts(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(configured(tmp_path / "run", *OFTEN, *settings))
    assert not (tmp_path / "run").exists()


def test_no_run_no_step_and_no_state_are_refused(analysed: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a training run"):
        analyze_run(RunAnalysisRequest(tmp_path), "sharpness", sharpness_of)
    with pytest.raises(UsageError, match=r"no checkpoint of step 99\. Its checkpoints are of the steps: .*6\."):
        analyze_run(RunAnalysisRequest(analysed.path, step=99, device="cpu"), "sharpness", sharpness_of)


def test_a_checkpoint_without_state_is_refused(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    run = RunDirectory.open(train(configured(tmp_path / "run", *SETTINGS, "training.max_steps=2")).run)
    request = RunAnalysisRequest(run.path, step=2, device="cpu")
    state = run.checkpoint(2) / "state"
    state.rename(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has no folder state/ with .*Use another --step\."):
        analyze_run(request, "sharpness", sharpness_of)


def test_a_run_that_has_diverged_is_refused(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    """A rate of 1e30 leaves finite weights whose loss is not; a weight that is no number is named."""
    fast = ("training.learning_rate=1e30", "training.max_grad_norm=null", "training.max_steps=2", *SETTINGS)
    run = RunDirectory.open(train(configured(tmp_path / "run", *fast)).run)
    request = RunAnalysisRequest(run.path, step=2, device="cpu")
    with pytest.raises(CheckpointError, match=r"curvature of the loss at step 2 is not finite: .*Use another --step\."):
        analyze_run(request, "sharpness", sharpness_of)
    with pytest.raises(CheckpointError, match="gradient of the loss at step 2 is not finite"):
        analyze_run(request, "noise", noise_of)


def test_the_default_interval_costs_at_most_3_percent() -> None:
    config = AnalysisConfig(quantities=("sharpness", "noise", "layers"))
    for rows in (4, 32, 512):
        interval = measuring_interval(config, rows, rows)
        assert cost_in_steps(config, rows, rows) / interval <= 0.03 < cost_in_steps(config, rows, rows) / (interval - 1)
    assert measuring_interval(config.replace(interval=7), 32, 32) == 7


def test_a_run_that_measured_nothing_has_no_advice(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="measured nothing while it trained"):
        advise(train(configured(tmp_path / "run", *SETTINGS, "training.max_steps=1")).run)
