"""What runs of post-training read: files by weights, data sets from the hub; and how large their steps are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.data import show_step
from sheepop.jobs.run.open import open_run, task_of
from sheepop.jobs.run.record import RunRecord, read_run_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train as train_request
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.shown import Decision
from sheepop.posttrain.config import Method

from ..command_line import in_process
from ..hub_server import LoopbackHub, client, hub
from ..running import train

__all__ = ["client", "hub"]
SETTINGS = (
    "device=cpu", "training.precision=fp32", "training.global_batch_size=8", "training.max_steps=4",
    "training.sample_prompts=[]", "training.log_batch_hash=true", "training.log_interval=1",
    "data.validation_fraction=0.1",
)  # fmt: skip
MIXTURE = "training.mixture=[{pattern: a.jsonl, weights: [[0, 3]]}, {pattern: '*', weights: [[0, 1]]}]"


def line(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sixty answers "a" in one shape, and twenty "b" in another."""
    folder = tmp_path_factory.mktemp("files")
    rows = {
        "a.jsonl": [line(f"{n}?", "a") for n in range(60)],
        "b.jsonl": [{"question": f"{n}?", "answer": "b"} for n in range(20)],
    }
    for name, each in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    return [folder / name for name in rows]


def config(files: list[Path], output: Path, *overrides: str, method: Method = "sft") -> SheepOpConfig:
    named = {"data": {"paths": [str(file) for file in files]}, "output_dir": str(output), "tuning": {"method": method}}
    return load_config(overrides=[*SETTINGS, *overrides], options=named)


@pytest.mark.parametrize("packing", [True, False])
def test_files_are_mixed_by_their_weights_in_every_step(
    base: Path, files: list[Path], tmp_path: Path, packing: bool
) -> None:
    """Of eight rows six are from the first file, which has three of four parts; a resumed run reads the same."""
    settings = (MIXTURE, f"data.packing={packing}", "data.max_length=32", "training.checkpoint_interval=2")
    whole = train(config(files, tmp_path / "whole", *settings), fork=base).run
    for step in (1, 3):
        answers: dict[int, set[str]] = {}
        for row, origin in show_step(whole, step):
            answers.setdefault(row, set()).add(origin.text.rpartition("Assistant:\n")[2][:1])
        assert sorted(answers.values(), key=str) == [{"a"}] * 6 + [{"b"}] * 2
    train(config(files, tmp_path / "run", *settings, "training.max_steps=2"), fork=base)
    stored = RunRecord.read(RunDirectory(tmp_path / "run")).requested
    train(load_config(overrides=["training.max_steps=4"], base=stored), resume=True)
    hashes = [
        [row["batch_hash"] for row in read_json_lines(run / "metrics.jsonl")[0] if row["split"] == "train"]
        for run in (whole, tmp_path / "run")
    ]
    assert len(set(hashes[0])) == 4 and hashes[0] == hashes[1]


def test_pairs_are_mixed_too_and_keep_their_reference(base: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, letter in zip(files, "ab", strict=True):
        pairs = [{"prompt": f"{n}?", "chosen": letter, "rejected": "no" * (n % 3 + 1)} for n in range(24)]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = train(config(files, tmp_path / "run", MIXTURE, method="dpo"), fork=base).run
    texts = [origin.text for row, origin in show_step(run, 2)]
    assert sum(text.endswith("?a") for text in texts) == 6 and sum(text.endswith("?b") for text in texts) == 2
    (first,) = [
        row for row in read_json_lines(run / "metrics.jsonl")[0] if row["split"] == "train" and row["step"] == 1
    ]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-4)  # the policy is still its reference


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [
        ("[{pattern: a.jsonl, weights: [[0, 1]]}]", r"examples match no pattern, for example those from '.*b\.jsonl'"),
        ("[{pattern: '*', weights: [[0, 1]]}, {pattern: c, weights: [[0, 1]]}]", r"no example matches 'c'"),
    ],
)
def test_a_mixture_that_does_not_fit_its_files_is_refused(
    base: Path, files: list[Path], tmp_path: Path, mixture: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        train(config(files, tmp_path / "run", f"training.mixture={mixture}"), fork=base)


@pytest.fixture
def published(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A data set with two splits, and one whose only file names none."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(line(f"{n}?", "a")) + "\n" for n in range(40)).encode()
    test = "".join(json.dumps(line(f"{n}!", "b")) + "\n" for n in range(10)).encode()
    hub.repository("owner/chats", {"data/train.jsonl": rows, "data/test.jsonl": test})
    hub.repository("owner/plain", {"chats.json": rows})
    return hub


def test_data_sets_of_the_hub_are_text(published: LoopbackHub, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"The sheep number {n} sleeps.\n" * 20}) + "\n" for n in range(40)).encode()
    published.repository("owner/text", {"data/train.jsonl": rows, "data/test.jsonl": rows[: len(rows) // 2]})
    sizes = ["model.d_model=16", "model.num_layers=1", "model.num_heads=1", "data.max_length=32"]
    settings = [*sizes, "tokenizer.algorithm=char", *SETTINGS[:4], "training.sample_prompts=[]", "--quiet"]
    ended = in_process("train", "--data", "hub:owner/text", "--output", tmp_path / "run", *settings)
    assert ended.code == 0, ended.err
    kept = read_run_config(RunDirectory(tmp_path / "run")).data.paths
    assert [Path(path).read_bytes() for path in kept] == [rows]
    chars = "tokenizer.algorithm=char"
    built = in_process("data", "build", "hub:owner/text:test", chars, "--output", tmp_path / "c", "--json", "--quiet")
    assert built.code == 0, built.err
    counts = json.loads(built.out)
    assert counts["train_documents"] + counts["validation_documents"] + counts["removed_documents"] == 20
    refused = in_process("train", "--data", "hub:owner/text:train:text", "--output", tmp_path / "other", *settings)
    assert refused.code == 2 and "data.extract.template" in refused.err


def test_data_sets_of_the_hub_are_examples(base: Path, published: LoopbackHub, tmp_path: Path) -> None:
    for name, options in (
        ("owner/chats", ["--validation", "hub:owner/chats:test"]),
        ("owner/plain", []),
    ):
        run = tmp_path / name.replace("/", "-")
        settings = [*SETTINGS, "--quiet"]
        ended = in_process("tune", "sft", base, "--data", f"hub:{name}", "--output", run, *options, *settings)
        assert ended.code == 0, ended.err
        task = task_of(read_run_config(RunDirectory(run)), RunDirectory(run), Console.silent())
        assert isinstance(task, ExampleTask)
        groups = (task.store.train.num_groups, task.store.validation.num_groups)
        assert groups == (40, 10) if options else sum(groups) == 40


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("hub:owner/chats:dev", DataError, "no split 'dev'.*It has: test, train"),
        ("hub:owner/chats:train:text", UsageError, r"names a column\. Leave it out, and name columns with tuning\.col"),
        ("hub:owner/none", DataError, "There is no dataset owner/none"),
    ],
)
def test_a_data_set_that_is_not_there_is_named(
    base: Path, published: LoopbackHub, tmp_path: Path, name: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        train(config([Path(name)], tmp_path / "run"), fork=base)
    assert published.total_sent == 0


def test_a_step_is_counted_in_tokens_to_learn(base: Path, files: list[Path], tmp_path: Path) -> None:
    """An answer has two such tokens. Of 80 examples a row of 64 holds some; a step is at most a sixteenth of them."""
    said = io.StringIO()
    given = {"data": {"paths": [str(file) for file in files], "validation_fraction": 0}, "device": "cpu"}
    rest: dict[str, Any] = {"training": {"precision": "fp32"}, "tuning": {"method": "sft", "batch_tokens": 6}}
    request = RunRequest(
        {**given, **rest, "output_dir": str(tmp_path / "run")}, fork=base, uses_recipe=False, console=Console(file=said)
    )
    run = open_run(request)
    rows, split = run.task.batches().num_samples, run.task.store.train  # type: ignore[attr-defined]
    assert split.num_supervised == 160
    size = run.config.training.global_batch_size
    assert size == max(1, round(6 * rows / 160)) and f"A step has {size} row" in said.getvalue()
    both = {**request.given, "training": {"precision": "fp32", "global_batch_size": 4}}
    again = RunRequest({**both, "output_dir": str(tmp_path / "both")}, fork=base, uses_recipe=False)
    with pytest.raises(ConfigError, match=r"training\.global_batch_size and tuning\.batch_tokens both say"):
        open_run(again)
    chosen = RunRequest({**given, "tuning": {"method": "sft"}, "output_dir": str(tmp_path / "chosen")}, fork=base)
    assert chosen.completed().chosen["tuning.batch_tokens"] == 8192
    found = open_run(chosen)
    steps = found.config.training.max_steps
    assert steps is not None and steps >= 3 * min(33, found.task.batches().num_samples)


def test_a_few_examples_get_small_steps_and_a_warning_with_the_key(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "twenty.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"is {n}", "completion": f" {n}."}) + "\n" for n in range(20)))
    said = io.StringIO()
    given = {"data": {"paths": [str(file)], "validation_fraction": 0}, "device": "cpu", "tuning": {"method": "sft"}}
    request = RunRequest({**given, "output_dir": str(tmp_path / "run")}, fork=base, console=Console(file=said))
    run = open_run(request)
    assert run.config.training.global_batch_size == 1
    steps = 3 * run.task.batches().num_samples
    assert run.config.training.max_steps == steps < 100
    assert f"make only {steps} steps in 3 epochs" in said.getvalue()
    assert "training.max_steps=100" in said.getvalue()


def test_a_finished_model_is_scored_before_its_first_step(base: Path, files: list[Path], tmp_path: Path) -> None:
    outcome = train(config(files, tmp_path / "run", "training.learning_rate=0.01"), fork=base)
    rows, _ = read_json_lines(outcome.run / "metrics.jsonl")
    first = next(row for row in rows if row["split"] == "validation")
    assert first["step"] == 0 and first["loss"] == outcome.before["loss"]
    assert outcome.scores is not None and outcome.scores.loss < outcome.before["loss"]
    assert "Before training" in (outcome.run / "report.html").read_text()


def test_minutes_pay_for_preparation_and_for_the_last_score(
    base: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sheepop.jobs.run.record.StageTimes.elapsed", property(lambda times: 21.0))
    settings = config(files, tmp_path / "run", "training.max_minutes=1")
    run = open_run(RunRequest.exactly(settings, fork=base, console=Console(file=said)))
    deadline = run.record.deadline
    assert deadline is not None
    assert 34 < deadline.seconds <= 35 and deadline.scored_tokens is None  # four are for the report
    assert "Of 1 minute, 21 s were used to prepare the run, training has 35 s" in said.getvalue()


def test_one_sees_the_steps_and_the_memory_of_a_run_before_it(base: Path, files: list[Path], tmp_path: Path) -> None:
    settings = config(files, tmp_path / "run", "training.max_epochs=2", "training.max_steps=null")
    task = task_of(settings, RunDirectory(tmp_path), Console.silent())
    assert isinstance(task, ExampleTask)
    found = Decision.of(task, base)
    outcome = train_request(RunRequest.exactly(settings, fork=base))
    assert (found.steps, found.rows) == (outcome.steps, 8)
    assert 10**5 < found.memory < found.usable_memory
    words = ["tune", "sft", base, "--data", files[0], "--show", "1", "--json", "device=cpu"]
    ended = in_process(*words)
    assert ended.code == 0, ended.err
    shown: Callable[..., Any] = json.loads(ended.out).__getitem__
    assert any(text.startswith("Chosen for a model of") for text in shown("said"))
    assert any("simple one" in text for text in shown("said")) and shown("steps") > 16
