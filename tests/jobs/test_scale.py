"""A family of small runs as one thing: stopped and resumed, with runs that diverge, fitted, and learning from a run."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from sheepop.checkpoint import RunDirectory
from sheepop.core.budget import Budget
from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import DataError, OutputError, UsageError
from sheepop.core.interrupts import Interrupted
from sheepop.jobs import family_runs
from sheepop.jobs import scale as job
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.emergence import emergence
from sheepop.jobs.run.request import RunRequest
from sheepop.scale import family
from sheepop.scale.allocation import Use
from sheepop.scale.family import Family, plan_family
from sheepop.scale.shapes import Shape, shape_for

from ..command_line import Launcher
from ..running import train_given

SIZES = [Shape.read(text) for text in ("32x1", "32x2", "32x3", "64x1")]
SETTINGS = (
    "device=cpu", "training.global_batch_size=4", "model.max_seq_len=16", "tokenizer.algorithm=char",
    "data.documents=blank_line", "model.ngrams=null", "data.validation_fraction=0.1", "training.sinks=[]",
    "training.sample_prompts=[]",
)  # fmt: skip


def request_of(place: Path) -> job.ScaleRequest:
    words, draw = ["sheep", "wool", "grass", "hill", "dog", "rain", "gate", "field", "lamb", "ewe"], random.Random(0)
    text = place.parent / "text.txt"
    text.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(100)), encoding="utf-8")
    budgets = Budget.of("1e10flops"), Budget.of("1.1e10flops")
    return job.ScaleRequest([text], budgets[0], place, budgets[1], SIZES, SETTINGS, at_once=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A family of two curves that was stopped in its fourth run and resumed, and the metrics of the first three."""
    place, started = tmp_path_factory.mktemp("scale") / "family", 0
    own = family_runs.train

    def stopping(request: RunRequest) -> object:
        nonlocal started
        started += 1
        if started == 4:
            raise KeyboardInterrupt
        return own(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family_runs, "train", stopping)
        patch.setattr(family, "_LEVELS", 2)
        with pytest.raises(Interrupted, match=r"Finished runs are kept. Go on with: .*scale --resume"):
            job.scale(request_of(place), Console.silent())
    before = {path.parent.name: path.read_bytes() for path in place.glob("runs/*/metrics.jsonl")}
    job.resume(place, Console.silent(), at_once=1)
    return place, before


def test_a_family_that_was_stopped_keeps_its_finished_runs(made: tuple[Path, dict[str, bytes]]):
    place, before = made
    assert len(before) == 3
    after = {path.parent.name: path.read_bytes() for path in place.glob("runs/*/metrics.jsonl")}
    assert {name: after[name] for name in before} == before
    assert set(after) == {member.name for member in Family.read(place).members}
    assert len(after) == 8


def started_by(pid: int) -> list[int]:
    """The processes that the threads of a process have started."""
    return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]


def is_at_work(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked what became of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_family_whose_process_is_killed_goes_on_to_the_same_law(
    made: tuple[Path, dict[str, bytes]], launcher: Launcher, tmp_path: Path
):
    """Two of its runs are to be trained side by side again, and are killed in the middle with the process."""
    place, last = tmp_path / "family", [member.name for member in Family.read(made[0]).members][-4:-2]
    shutil.copytree(made[0], place)
    for name in last:
        shutil.rmtree(place / "runs" / name)
    (place / "law.json").unlink()
    process = launcher.start("scale", "--resume", place, "--at-once", "2", "--quiet")
    while not any((place / "runs" / name / "checkpoints" / "latest").is_file() for name in last):
        assert process.poll() is None, process.poll()
        time.sleep(0.005)
    trainers = started_by(process.pid)
    with pytest.raises(UsageError, match="Another process works on the family"):
        job.resume(place, Console.silent(), at_once=1)
    assert process.kill().code == -signal.SIGKILL
    assert len(trainers) == 2
    until = time.monotonic() + 60
    while any(map(is_at_work, trainers)):
        assert time.monotonic() < until, "the runs of a killed family go on"
        time.sleep(0.005)
    members = [member for member in Family.read(place).members if member.name in last]
    assert not all(family_runs.is_done(place, member) for member in members)
    job.resume(place, Console.silent(), at_once=1)
    assert (place / "law.json").read_bytes() == (made[0] / "law.json").read_bytes()
    for name in last:
        whole, resumed = (RunDirectory(each / "runs" / name) for each in (made[0], place))
        assert whole.steps() == resumed.steps()
        for file in ("model.safetensors", "state/optimizer.safetensors"):
            first, second = (load_file(run.checkpoint(run.steps()[-1]) / file) for run in (whole, resumed))
            assert {key: each.tobytes() for key, each in first.items()} == {
                key: each.tobytes() for key, each in second.items()
            }


def test_the_law_and_the_recommended_run_are_written(made: tuple[Path, dict[str, bytes]]):
    place = made[0]
    found = json.loads((place / "law.json").read_text())
    assert len(found["runs"]) == 8 and found["left_out"] == {} and found["law"]["prior"] == "besiroglu"
    for run in found["runs"]:
        (score,) = [
            json.loads(line)
            for line in (place / "runs" / run["name"] / "metrics.jsonl").read_text().splitlines()
            if '"score"' in line
        ]
        assert run["loss"] == score["loss"]
    best = found["recommended"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(1e10)
    assert best["loss_between"][0] <= best["loss"] <= best["loss_between"][1]
    settings = yaml.safe_load((place / "run.yaml").read_text())
    config = validate(SheepOpConfig, settings)
    assert (config.model.d_model, config.model.num_layers) == (best["d_model"], best["num_layers"])
    assert config.training.max_tokens == round(best["tokens"])
    assert config.training.learning_rate == best["learning_rate"]
    assert config.data.paths == (str((place / "corpus").absolute()),)
    page = (place / "report.html").read_text()
    assert "Recommended run" in page and "drawn towards" in page
    assert (place / "law.png").stat().st_size > 1000


def test_a_run_that_diverges_is_left_out_and_named(made: tuple[Path, dict[str, bytes]], tmp_path: Path):
    place = tmp_path / "family"
    shutil.copytree(made[0], place)
    first, second, *_ = Family.read(place).members
    shutil.rmtree(place / "runs" / first.name)
    settings = json.loads((place / "family.json").read_text())
    settings["settings"]["training"] |= {"learning_rate": 1e30, "trouble": {"non_finite": "stop"}}
    (place / "family.json").write_text(json.dumps(settings))
    metrics = place / "runs" / second.name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [json.dumps(row | ({"loss": 9.5} if row["split"] == "score" else {})) for row in rows]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    left_out = job.resume(place, Console.silent(), at_once=1).left_out
    assert set(left_out) == {first.name, second.name}
    assert "diverged: a guess has a loss of" in left_out[second.name] and "9.5" in left_out[second.name]
    assert "Left out" in (place / "report.html").read_text()


def test_a_damaged_file_of_a_run_is_named_and_its_scores_are_made_again(
    made: tuple[Path, dict[str, bytes]], tmp_path: Path
):
    place = tmp_path / "family"
    shutil.copytree(made[0], place)
    first, second, *_ = Family.read(place).members
    law, failed = (place / "law.json").read_bytes(), place / "runs" / first.name / "failed.json"
    failed.write_text("[]")
    with pytest.raises(DataError, match=r"failed.json is damaged. Remove it to train this run again"):
        job.resume(place, Console.silent(), at_once=1)
    failed.unlink()
    metrics = place / "runs" / second.name / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])  # of the line with the score
    assert job.resume(place, Console.silent(), at_once=1).left_out == {}
    assert (place / "law.json").read_bytes() == law


def test_a_finished_run_is_set_beside_the_prediction_and_learnt_from(
    made: tuple[Path, dict[str, bytes]], tmp_path: Path
):
    place, run = tmp_path / "family", tmp_path / "large"
    shutil.copytree(made[0], place)
    settings = yaml.safe_load((place / "run.yaml").read_text())
    settings["training"].pop("max_tokens")
    training = settings["training"] | {"max_steps": 40, "precision": "fp32"}
    given = settings | {"output_dir": str(run), "training": training}
    family_runs.train(RunRequest(given, uses_recipe=False))
    beside, scaled = job.learn(place, run, Console.silent())
    assert len(scaled.runs) == 9 and scaled.runs[0].name == str(run)
    assert beside.low <= beside.predicted <= beside.high
    assert beside.is_inside == (beside.low <= beside.loss <= beside.high)
    again, twice = job.learn(place, run, Console.silent())
    assert len(twice.runs) == 9
    assert again.predicted == pytest.approx(beside.predicted, rel=1e-6)
    assert json.loads((place / "law.json").read_text())["beside"][0]["name"] == str(run)
    other = train_given((
        f"data.paths={made[0].parent / 'text.txt'}", f"output_dir={tmp_path / 'other'}", "training.max_steps=1",
        "tokenizer.algorithm=char", "model.d_model=16", "model.num_layers=1", "model.num_heads=1", "device=cpu",
        "model.max_seq_len=16",
    ))  # fmt: skip
    with pytest.raises(DataError, match="is not scored on the held-out text"):
        job.learn(place, other.run, Console.silent())


def test_tasks_are_asked_of_the_family_and_of_the_checkpoints_of_a_run(made: tuple[Path, dict[str, bytes]]):
    place = made[0]
    questions = place / "quiz.jsonl"
    row = {"prompt": "wool grass", "choices": [" hill", "x"], "answer": 0}
    questions.write_text(f"{json.dumps(row)}\n")
    found = emergence(place, [str(questions)], None, 0, Console.silent()).courses[0]
    assert len(found.points) == 8
    assert [point.flops for point in found.points] == sorted(point.flops for point in found.points)
    assert all(point.bits >= 0 for point in found.points)
    assert (place / "emergence.png").is_file()
    with pytest.raises(UsageError, match="--tasks riddles"):
        emergence(place, ["riddles"], None, 0, Console.silent())


def test_what_cannot_be_planned_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="too few for 6 runs of three sizes"):
        plan_family(1e6, 512, lambda flops: 1e5, 2048)
    with pytest.raises(UsageError, match=r"would get 0 steps; 30 are the fewest. Give --spend .*flops"):
        plan_family(1e6, 512, lambda flops: 1e5, 2048, SIZES)
    with pytest.raises(UsageError, match="three sizes at least"):
        plan_family(1e13, 512, lambda flops: 1e5, 2048, SIZES[:2])
    with pytest.raises(UsageError, match="as times or operations"):
        job.scale(replace(request_of(tmp_path), budget=Budget.of("3usd")), Console.silent())
    with pytest.raises(UsageError, match="--sizes 33x2: write WIDTHxLAYERS"):
        Shape.read("33x2")
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        job.scale(request_of(tmp_path), Console.silent())
    with pytest.raises(DataError, match="holds no family"):
        job.resume(tmp_path, Console.silent())
    (tmp_path / "family.json").write_text('{"corpus": 3}')
    with pytest.raises(DataError, match=r"family.json is damaged: corpus"):
        Family.read(tmp_path)


def test_curves_of_a_family_have_equal_operations_and_cost_what_they_may():
    members = plan_family(4e13, 512, lambda flops: 1e5, 2048, [Shape.read(text) for text in ("32x2", "64x2", "96x2")])
    costs = [member.cost(512, 2048) for member in members]
    assert sum(costs) == pytest.approx(4e13, rel=0.02)
    for level in range(3):
        assert max(costs[3 * level : 3 * level + 3]) == pytest.approx(min(costs[3 * level : 3 * level + 3]), rel=0.05)


def test_the_sizes_of_a_family_are_apart_and_around_the_best_one():
    members = plan_family(1e14, 2048, lambda flops: 4e5 * (flops / 1e13) ** 0.5, 2048)
    assert len(members) == 12
    for level, flops in enumerate(1e14 / 4 / (1 + 1 / 3 + 1 / 9) / 3**back for back in (2, 1, 0)):
        sizes = [member.shape.parameters(2048) for member in members[4 * level : 4 * level + 4]]
        assert len(set(sizes)) == 4
        assert min(sizes) < 4e5 * (flops / 1e13) ** 0.5 < max(sizes)
    few = plan_family(3e12, 2048, lambda flops: 4.2e5 * (flops / 2e12) ** 0.5, 2048)
    assert 6 <= len(few) < 12 and all(member.steps >= 30 for member in few)


def test_shapes_and_rates_continue_what_was_measured():
    """Widths, blocks and rates of bench/results/minutes.md: 2 layers of width 128 at 0.016, 4 of 192 at 0.012."""
    assert (str(Shape.of_width(128)), Shape.of_width(128).learning_rate) == ("128x2", 0.016)
    assert (str(Shape.of_width(192)), Shape.of_width(192).learning_rate) == ("192x4", 0.012)
    assert Shape.read("64x2") == Shape(64, 2, 2)
    for wanted in (1e6, 1e7, 1e8, 1e9):
        shape = shape_for(wanted, 4096)
        assert abs(math.log(shape.parameters(4096) / wanted)) < 0.35
        assert shape.d_model % (2 * shape.num_heads) == 0


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.016, 0.012]),
        ({"model": {"initialization": "mup", "mup_base_d_model": 128}}, [0.016, 0.016]),
        ({"training": {"learning_rate": 0.005}}, [0.005, 0.005]),
    ],
)
def test_the_rate_of_a_shape_is_the_rules_that_of_the_base_width_or_a_given_one(settings: Any, rates: list[float]):
    """muP changes the rate of the base width itself, so every run is given that."""
    family = Family(
        "", 512, 1, (), {"model": {}, "training": {}, **settings}, Budget.of("1h"), Use(), 1.0, Shape.of_width(128)
    )
    assert [family.learning_rate(Shape.of_width(width)) for width in (128, 192)] == rates
