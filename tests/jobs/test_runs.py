"""Listing and comparing runs, from directories written by hand."""

from __future__ import annotations

import fcntl
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import dump_config, validate
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.listing import compare_runs, list_runs, row, write_comparison
from sheepop.jobs.run.record import RunRecord, view_run_config
from sheepop.jobs.run.report import write_run_report

MODEL = {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
# Embedding; per layer: attention with biases, feed-forward with biases, two norms; the last norm. The head is tied.
PARAMETERS = 300 * 32 + 2 * (4 * (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32) + 4 * 32) + 2 * 32


def make_run(
    path: Path, losses: list[float], *, steps: int = 0, stale: int | None = None, **training: Any
) -> RunDirectory:
    """A run of ten steps a validation; loss and bits per byte are in the ratio of 2 to 1."""
    run = RunDirectory.create(path)
    settings = {"max_steps": 100, "learning_rate": 0.001, **training}
    config = validate(SheepOpConfig, {"model": MODEL, "training": settings, "output_dir": str(path)})
    run.config_file.write_text(dump_config(config))
    rows = []
    for number, loss in enumerate(losses, start=1):
        step = {"step": number * 10, "tokens": number * 1280, "seconds": number * 1.5}
        rows += [{**step, "split": "train", "loss": loss - 0.5}]
        rows += [{**step, "split": "validation", "loss": loss, "bits_per_byte": loss / 2}]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if steps:
        state = run.checkpoint(steps) / "state"
        state.mkdir(parents=True)
        counters = {"step": steps, **({} if stale is None else {"stale_validations": stale})}
        (state / "state.json").write_text(
            json.dumps({"format_version": 1, "counters": counters, "optimizer_scalars": {}})
        )
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs, one of them stopped and one without a score, and two folders that hold none."""
    runs = tmp_path / "runs"
    make_run(runs / "good", [5.0 - 0.2 * i for i in range(10)], steps=100)
    make_run(runs / "better", [4.0, 2.0, 2.5, 2.2], learning_rate=0.01, optimizer="muon")
    make_run(runs / "begun", [])
    (runs / "photos").mkdir()
    (runs / "damaged").mkdir()
    (runs / "damaged" / "config.yaml").write_text("model: [")
    (runs / ".hidden").mkdir()
    return runs


def test_runs_of_one_name_are_told_apart_and_none_is_listed_twice(tmp_path: Path) -> None:
    one, other, third = tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "alone"
    for place, path in enumerate((one, other, third)):
        make_run(path, [3.0 + place])
    comparison = compare_runs([one, tmp_path / "b", one.parent])
    assert [run.summary.name for run in comparison.listing.runs] == [str(one), str(other), "alone"]
    with pytest.raises(UsageError, match="needs two runs, but only one was found"):
        compare_runs([one, one / ".." / "run"])


def test_runs_are_listed_best_first_with_their_scores(folder: Path) -> None:
    listing = list_runs([folder])
    found = [run.summary.to_dict() for run in listing.runs]
    assert [run["name"] for run in found] == ["better", "good", "begun"]
    assert found[0] == {
        "name": "better",
        "path": str(folder / "better"),
        "state": "stopped",
        "ended_early": False,
        "parameters": PARAMETERS,
        "steps": 40,
        "total_steps": 100,
        "tokens": 5120,
        "seconds": 6.0,
        "best_loss": 2.0,
        "bits_per_byte": 1.0,
        "is_sampled": False,
        "last_train_loss": pytest.approx(1.7),
    }
    assert row(listing.runs[1].summary) == (
        "good",
        "finished",
        "35.1k",
        "100 of 100",
        "12.8k",
        "15.0 s",
        "3.2000",
        "1.6000",
    )
    assert row(listing.runs[2].summary)[3:] == ("0 of 100", "–", "–", "–", "–")


def test_a_run_has_one_score_and_before_it_is_finished_one_of_a_sample(folder: Path) -> None:
    run = make_run(folder / "sampled", [4.0, 3.5], eval_tokens=64)
    (found,) = list_runs([run.path]).runs
    assert found.summary.is_sampled
    assert row(found.summary)[-2:] == ("3.5000 (sample)", "1.7500 (sample)")
    record = RunRecord("0.1.0", "c" * 64, "t" * 64, 93e9, None, {}, {})
    write_run_report(run, view_run_config(run), None, record, {})
    report = run.report.read_text(encoding="utf-8")
    assert "<dd>1.7500 (sample)</dd>" in report
    assert '"name":"This model (sample)"' in report
    page = write_comparison(compare_runs([run.path, folder / "good"]), folder / "out").read_text(encoding="utf-8")
    assert '"name":"sampled (sample)"' in page and '"name":"good"' in page
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 20, "split": "score", "loss": 3.625, "bits_per_byte": 1.8125}) + "\n")
    (found,) = list_runs([run.path]).runs
    assert not found.summary.is_sampled
    assert row(found.summary)[-2:] == ("3.6250", "1.8125")


def test_what_is_no_run_is_named_with_the_reason_and_stops_nothing(folder: Path) -> None:
    left_out = list_runs([folder]).left_out
    assert left_out.keys() == {str(folder / "damaged"), str(folder / "photos")}
    assert left_out[str(folder / "photos")] == "not a run"
    assert "line 1: not valid YAML" in left_out[str(folder / "damaged")]


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("loss", ["better", "good", "begun"]),
        ("name", ["begun", "better", "good"]),
        ("steps", ["good", "better", "begun"]),
        ("tokens", ["good", "better", "begun"]),
        ("time", ["good", "better", "begun"]),
    ],
)
def test_runs_are_sorted_as_asked(folder: Path, sort: Any, names: list[str]) -> None:
    assert [run.summary.name for run in list_runs([folder], sort=sort).runs] == names


@pytest.mark.parametrize(("stale", "state", "early"), [(3, "finished", True), (2, "stopped", False)])
def test_a_run_out_of_patience_is_finished(tmp_path: Path, stale: int, state: str, early: bool) -> None:
    make_run(tmp_path / "run", [4.0, 4.1, 4.2, 4.3], steps=40, stale=stale, early_stopping=3)
    (run,) = list_runs([tmp_path / "run"]).runs
    assert (run.summary.state, run.summary.ended_early) == (state, early)


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [4.0])
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list_runs([tmp_path / "run"]).runs[0].summary.state == "running"
    assert list_runs([tmp_path / "run"]).runs[0].summary.state == "stopped"


def test_settings_that_differ_are_found(folder: Path) -> None:
    comparison = compare_runs([folder / "good", folder / "better"])
    assert comparison.settings == {
        "training.optimizer": ["muon", "adamw"],
        "training.learning_rate": [0.01, 0.001],
    }


def test_a_comparison_needs_two_runs(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"needs two runs, but only one was found\. .*photos is left out: not a run"):
        compare_runs([folder / "good", folder / "photos"])
    with pytest.raises(CheckpointError, match="is not a directory"):
        list_runs([folder / "nowhere"])


def test_page_picture_and_numbers_are_written(folder: Path, tmp_path: Path) -> None:
    comparison = compare_runs([folder])
    page = write_comparison(comparison, tmp_path / "out")
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {
        "comparison.html",
        "comparison.json",
        "comparison.png",
        "comparison.svg",
    }
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written == json.loads(json.dumps(comparison.to_dict()))
    assert "<td>better</td>" in page.read_text() and "training.optimizer" in page.read_text()
    svg = (tmp_path / "out" / "comparison.svg").read_bytes()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    write_comparison(comparison, tmp_path / "again")
    assert (tmp_path / "again" / "comparison.svg").read_bytes() == svg


def hold_out(run: RunDirectory, checksums: list[str], tokens: int) -> None:
    """A corpus of which nothing is there but what its manifest says of the held-out text."""
    run.corpus.mkdir()
    files = [{"file": "val.jsonl.zst", "documents": 1, "sha256": checksum} for checksum in checksums]
    manifest = {"format": "sheepop corpus", "format_version": 1}
    text = json.dumps({**manifest, "tokens": {"splits": {"validation": {"tokens": tokens, "files": files}}}})
    (run.corpus / "manifest.json").write_text(text)


def test_a_comparison_warns_where_held_out_texts_differ_or_are_not_known(tmp_path: Path) -> None:
    one, two, three = (make_run(tmp_path / name, [2.0]) for name in ("one", "two", "three"))
    assert "may be for different texts" in str(compare_runs([one.path, two.path]).warning)
    hold_out(one, ["a", "b"], tokens=100)
    hold_out(two, ["a", "b"], tokens=70)  # the same text in other tokens
    hold_out(three, ["a", "c"], tokens=100)
    assert compare_runs([one.path, two.path]).warning is None
    assert "hold out different texts" in str(compare_runs([one.path, three.path]).warning)
    page = write_comparison(compare_runs([one.path, three.path]), tmp_path / "out").read_text()
    assert "hold out different texts" in page
    manifest = json.loads((two.corpus / "manifest.json").read_text())
    for damaged in ([], ["a"], {"a": 1}, None):
        manifest["tokens"]["splits"]["validation"]["files"] = damaged
        (two.corpus / "manifest.json").write_text(json.dumps(manifest))
        assert "may be for different texts" in str(compare_runs([one.path, two.path]).warning)


def test_the_last_texts_of_runs_stand_side_by_side_and_tensorboard_is_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [2.0]) for name in ("one", "two")]
    for run in runs:
        rows = [{"step": step, "prompt": "Oh", "text": f" {run.path.name} {step}"} for step in (0, 9)]
        run.samples_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.tensorboard.mkdir()
    page = write_comparison(compare_runs([run.path for run in runs]), tmp_path / "out").read_text()
    assert page.count('<figure class="sample half">') == 2
    assert " one 9<" in page and " two 9<" in page and " one 0<" not in page
    assert f"--logdir_spec one:{tmp_path}/one/tensorboard,two:{tmp_path}/two/tensorboard" in page
