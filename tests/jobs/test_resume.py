"""What a resumed run may change, and that what it may not is refused instead of ignored."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import leaves, read_config_file, validate
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError, DataError, DeviceError, StorageError
from sheepop.core.json_lines import read_json_lines
from sheepop.core.keys import may_change
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.data import build
from sheepop.jobs.run.open import find_resumable, with_changes
from sheepop.jobs.run.record import write_run_config
from sheepop.jobs.run.step_memory import bytes_of_a_step
from sheepop.jobs.task.corpus import require_text

from ..running import train

Start = Callable[..., Path]


@pytest.fixture(scope="module")
def start(configured: Callable[..., SheepOpConfig]) -> Start:
    """Takes four steps into a directory, with more settings if given, and returns it."""

    def run(output: Path, *overrides: str, **places: Path) -> Path:
        train(configured(output, "training.max_steps=4", *overrides, **places))
        return output

    return run


@pytest.fixture(scope="module")
def finished(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resume(run: Path, *overrides: str, console: Console | None = None, job: Callable[..., Any] = train) -> None:
    stored = find_resumable(run)
    assert stored is not None
    config = load_config(overrides=(*overrides, f"output_dir={run}"), base=stored.record.requested)
    job(config, resume=True, console=console)


def resolved(run: Path) -> dict[str, Any]:
    return read_config_file(run / "config.yaml")


def timeless(run: Path) -> list[dict[str, Any]]:
    rows, _ = read_json_lines(run / "metrics.jsonl")
    return [
        {
            key: row[key]
            for key in row
            if key not in ("seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores")
        }
        for row in rows
    ]


def steps(run: Path) -> int:
    return max(row["step"] for row in read_json_lines(run / "metrics.jsonl")[0])


def test_more_steps_are_taken_and_kept_when_resumed_again(run: Path) -> None:
    resume(run, "training.max_steps=6")
    assert (steps(run), resolved(run)["training"]["max_steps"]) == (6, 6)
    resume(run)
    assert (steps(run), resolved(run)["training"]["max_steps"]) == (6, 6)
    assert json.loads((run / "environment.json").read_text())["asked"]["training"]["max_steps"] == 6


def test_a_budget_that_is_spent_is_said_and_nothing_is_trained(run: Path) -> None:
    before, words = (run / "metrics.jsonl").read_bytes(), io.StringIO()
    resume(run, console=Console(quiet=True, file=words))
    assert words.getvalue() == (
        "Warning: All 4 steps of this run have been taken. To train for longer, raise training.max_steps.\n"
    )
    assert (run / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"max_steps = 3, but the run has already taken 4 steps\. Give at least"):
        resume(run, "training.max_steps=3")


@pytest.mark.parametrize("budget", ["max_minutes=5", "max_tokens=1000000", "max_epochs=9"])
def test_more_of_another_budget_is_refused_and_not_ignored(run: Path, budget: str) -> None:
    with pytest.raises(ConfigError, match=r"was None and is now .* To train for longer, raise training\.max_steps\."):
        resume(run, f"training.{budget}")
    assert steps(run) == 4


def test_a_run_without_any_checkpoint_begins_again_and_says_so(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before, words = timeless(run), io.StringIO()
    resume(run, console=Console(quiet=True, file=words))
    assert words.getvalue() == f"Warning: {run} has no checkpoint, so the run starts from the beginning.\n"
    assert timeless(run) == before


def test_what_a_kill_left_undone_is_done_when_the_run_goes_on(run: Path) -> None:
    directory = RunDirectory.open(run)
    samples = directory.samples_file.read_bytes()
    directory.samples_file.write_bytes(samples + b'{"step": 5}\n')
    for name in ("latest", "best"):
        (directory.checkpoints / name).unlink()
    (directory.checkpoints / ".step-00000005.partial-0123456789ab").mkdir()
    resume(run)
    assert (directory.pointer("latest"), directory.pointer("best")) == (4, 4)
    assert not list(directory.checkpoints.glob(".*"))
    assert directory.samples_file.read_bytes() == samples


def test_a_run_without_any_whole_checkpoint_is_refused_and_kept(run: Path) -> None:
    directory = RunDirectory.open(run)
    for step in directory.steps():
        (directory.checkpoint(step) / "model.safetensors").write_bytes(b"")
    before, steps_before = directory.metrics_file.read_bytes(), directory.steps()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact, so the run cannot be resumed"):
        resume(run, "training.max_steps=6")
    assert (directory.metrics_file.read_bytes(), directory.steps()) == (before, steps_before)


def test_what_is_refused_is_not_written_down(run: Path) -> None:
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "environment.json", "metrics.jsonl")}
    for change in ("seed=7", "training.learning_rate=0.5", "training.global_batch_size=8", "model.num_layers=2"):
        with pytest.raises(ConfigError, match=rf"keeps its settings, but {change.split('=')[0]} was"):
            resume(run, "training.max_steps=6", change)
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_run_has_its_record_on_the_disk_when_it_begins_to_be_one(
    start: Start, tmp_path: Path, disk_order: list[str]
) -> None:
    """A kill between the two leaves no run, rather than one that cannot go on."""
    start(tmp_path / "run")
    renamed = [event.rpartition(" -> ")[2] for event in disk_order if " -> " in event]
    assert renamed.index("environment.json") < renamed.index("config.yaml") < renamed.index("step-00000001")


def test_a_file_in_the_place_of_the_checkpoints_is_refused(run: Path) -> None:
    (run / "checkpoints").rename(run / "aside")
    (run / "checkpoints").touch()
    with pytest.raises(StorageError, match="checkpoints: part of the path is a file, not a directory"):
        resume(run, "training.max_steps=6")
    assert steps(run) == 4


def test_a_change_that_is_taken_back_is_not_ignored(run: Path) -> None:
    resume(run, "training.max_steps=6")
    resume(run, "training.log_interval=3")
    resume(run, "training.log_interval=10")
    assert resolved(run)["training"]["log_interval"] == 10
    with pytest.raises(ConfigError, match=r"max_steps = 4, but the run has already taken 6 steps"):
        resume(run, "training.max_steps=4")
    assert resolved(run)["training"]["max_steps"] == 6


@pytest.mark.parametrize("key", ["max_steps", "eval_interval", "sample_interval", "checkpoint_interval"])
def test_what_is_derived_once_cannot_be_unset(run: Path, key: str) -> None:
    resume(run, f"training.{key}=5")
    with pytest.raises(ConfigError, match=rf"not resolved yet: training.{key}"):
        resume(run, f"training.{key}=null")
    assert resolved(run)["training"][key] == 5


def test_a_resumed_run_may_change_what_auto_chose_for_its_memory(run: Path, start: Start, tmp_path: Path) -> None:
    config = validate(SheepOpConfig, resolved(run))
    config = config.replace(model={**config.model.model_dump(), "num_layers": 6})
    needed = bytes_of_a_step(config, config.training, config.model.max_seq_len, "cpu")
    budget = (needed.peak("full", 6) + needed.peak("none", 0)) / 2e9
    auto = ("training.activation_checkpointing=auto", f"training.memory_budget={budget}")
    other = start(tmp_path / "other", "model.num_layers=6", *auto)
    chosen = resolved(other)["training"]
    assert chosen["activation_checkpointing"] != "none"
    assert chosen["checkpointed_blocks"] is not None
    resume(other, "training.max_steps=5", "training.activation_checkpointing=none", "training.memory_budget=null")
    after = resolved(other)["training"]
    assert (after["activation_checkpointing"], after["checkpointed_blocks"]) == ("none", None)
    assert steps(other) == 5


@pytest.mark.parametrize("prompts", ['["the", ""]', "['" + "the sheep " * 200 + "']"])
def test_a_prompt_that_cannot_be_continued_is_refused_before_a_step(
    run: Path, start: Start, tmp_path: Path, prompts: str
) -> None:
    before = timeless(run)
    with pytest.raises(ConfigError, match=r"training\.sample_prompts: (Prompt 2 is empty|The prompt has .* tokens)"):
        resume(run, "training.max_steps=6", f"training.sample_prompts={prompts}")
    assert timeless(run) == before
    with pytest.raises(ConfigError, match=r"training\.sample_prompts"):
        start(tmp_path / "new", f"training.sample_prompts={prompts}")
    assert not (tmp_path / "new" / "config.yaml").exists()


def test_patience_without_held_out_text_is_refused_when_a_run_goes_on(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path / "run", "data.validation_fraction=0")
    with pytest.raises(ConfigError, match="early_stopping watches the loss on held-out text, but no text is held out"):
        resume(run, "training.max_steps=6", "training.early_stopping=2")


def test_other_text_is_refused_and_not_ignored(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("something else entirely\n" * 30)
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"keeps its text, but data.paths was .*other\.txt"):
        resume(run, f"data.paths={tmp_path / 'other.txt'}")
    assert (run / "config.yaml").read_bytes() == before


def test_a_finished_corpus_may_be_moved_but_not_exchanged(start: Start, text_folder: Path, tmp_path: Path) -> None:
    console = Console.silent()
    settings = [str(text_folder), "tokenizer.algorithm=char"]
    build(settings, tmp_path / "corpus", None, console)
    build([*settings, "seed=5"], tmp_path / "another", None, console)
    run = start(tmp_path / "run", data=tmp_path / "corpus")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    resume(run, f"data.paths={tmp_path / 'moved'}", "training.max_steps=5")
    assert steps(run) == 5
    assert resolved(run)["data"]["paths"] == [str(tmp_path / "moved")]
    with pytest.raises(CheckpointError, match="is not what this run was started with"):
        resume(run, f"data.paths={tmp_path / 'another'}")


def test_what_was_measured_is_stored_and_not_measured_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ("training.max_steps=null", "training.max_minutes=0.08", "training.max_epochs=1")
    run = start(tmp_path / "run", *budget, "training.precision=auto")
    stored = read_config_file(run / "config.yaml")["training"]
    assert stored["precision"] in ("fp32", "bf16")
    assert stored["max_minutes"] is None
    record = json.loads((run / "environment.json").read_text())
    assert record["step_seconds"] > 0
    assert record["asked"]["training"]["max_minutes"] == 0.08

    def measuring(*_: Any, **__: Any) -> None:
        raise AssertionError("a resumed run measures nothing")

    monkeypatch.setattr("sheepop.jobs.run.resolve.measure_step", measuring)
    monkeypatch.setattr("sheepop.jobs.run.resolve.matrix_peak", measuring)
    resume(run, f"training.max_steps={stored['max_steps'] + 2}")
    rows, _ = read_json_lines(run / "metrics.jsonl")
    assert rows[-1]["step"] == stored["max_steps"] + 2


def test_a_resumed_run_keeps_every_setting_that_is_not_marked(run: Path) -> None:
    stored = find_resumable(run)
    assert stored is not None
    settings = {**stored.config.model_dump(mode="json"), "output_dir": str(run)}
    taken, refused = set(), set()
    for key, value in leaves(settings):
        begun = replace(stored, record=replace(stored.record, requested=_with_value(settings, key, "something else")))
        try:
            _, config = with_changes(begun, settings, run)
            assert dict(leaves(config.model_dump(mode="json")))[key] == value
            taken.add(key)
        except ConfigError as error:
            assert f"{key} was 'something else' and is now " in str(error)
            refused.add(key)
    assert taken == may_change(SheepOpConfig) & (taken | refused)
    assert taken >= {"device", "training.prefetch", "training.trouble.spike", "data.paths", "generation.temperature"}
    assert refused >= {"seed", "training.learning_rate", "training.trouble.window", "model.dropout", "data.split"}


def _with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {**tree, first: _with_value(tree[first], rest, value) if rest else value}


def test_a_run_older_than_a_setting_had_its_default(run: Path) -> None:
    file = run / "environment.json"
    record = json.loads(file.read_text())
    for key in ("layers", "ema_decay", "decay_steps"):
        del record["asked"]["training"][key]
    file.write_text(json.dumps(record))
    resume(run, "training.max_steps=5")
    assert steps(run) == 5
    with pytest.raises(ConfigError, match=r"training\.ema_decay was None and is now 0\.9"):
        resume(run, "training.ema_decay=0.9")


def test_the_record_says_where_a_run_started_and_went_on(run: Path) -> None:
    before = json.loads((run / "environment.json").read_text())
    assert (before["seed"], before["resumed"]) == (0, [])
    assert before["compute"]["device"] == "cpu"
    assert before["compute"]["deterministic"] is True
    assert before["compute"]["tensor_float_32"] is False
    assert before["compute"]["cublas_workspace"] is None
    assert before["started"].endswith("+00:00")
    resume(run, "training.max_steps=6", "training.sinks=[]", "training.early_stopping=50")
    after = json.loads((run / "environment.json").read_text())
    (session,) = after["resumed"]
    assert (session["step"], session["machine"]["python"]) == (4, before["machine"]["python"])
    assert after["started"] == before["started"] < session["time"]


def test_a_record_of_before_is_still_read(run: Path) -> None:
    record = json.loads((run / "environment.json").read_text())
    for key in ("seed", "started", "git", "compute", "resumed"):
        del record[key]
    (run / "environment.json").write_text(json.dumps(record))
    resume(run, "training.max_steps=5", job=train)
    assert steps(run) == 5
    assert (run / "report.html").is_file()


def test_a_state_of_before_is_still_read(run: Path) -> None:
    from sheepop.core.files import write_checksums

    state = run / "checkpoints" / "step-00000004" / "state" / "state.json"
    content = json.loads(state.read_text())
    for key in ("reference_loss", "stale_validations"):
        del content["counters"][key]
    state.write_text(json.dumps(content))
    write_checksums(state.parents[1])
    resume(run, "training.max_steps=5")
    assert steps(run) == 5


@pytest.mark.parametrize("lost", ["config.yaml", "everything beside the checkpoints"])
def test_checkpoints_without_their_configuration_are_kept(run: Path, tmp_path: Path, lost: str) -> None:
    for entry in list(run.iterdir()):
        if entry.name == "config.yaml" or (lost != "config.yaml" and entry.name != "checkpoints"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing, .* --fork .*step-00000004"):
        train(load_config(overrides=[f"output_dir={run}"]), resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [("num_heads: 2", "num_heads: 1"), ("learning_rate: ", "learning_rate: 1"), ("seed: ", "# a remark\nseed: ")],
)
def test_a_configuration_that_was_edited_is_refused_and_not_taken(run: Path, before: str, after: str) -> None:
    text = (run / "config.yaml").read_text()
    assert before in text
    (run / "config.yaml").write_text(text.replace(before, after))
    with pytest.raises(
        CheckpointError, match=r"config\.yaml is not what the run wrote: .* start a new run with .*--conf"
    ):
        resume(run, "training.max_steps=6")
    (run / "config.yaml").write_text(text)
    resume(run, "training.max_steps=6")
    assert steps(run) == 6


def test_a_configuration_of_before_had_no_checksum(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.split("\n", 1)[1])
    resume(run, "training.max_steps=6")
    assert (run / "config.yaml").read_text().split("\n", 1)[0] != text.split("\n", 1)[0]
    assert steps(run) == 6


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "lacks|not resolved"), (b"\xff\xfe", "not text"), (b"a: [", "YAML")]
)
def test_what_is_left_of_a_configuration_is_no_configuration(run: Path, content: bytes, words: str) -> None:
    (run / "config.yaml").write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        resume(run)


@pytest.mark.parametrize(
    "change", [{"asked": None}, {"resumed": 5}, {"corpus_fingerprint": ["a"]}, {"machine": "mine"}]
)
def test_a_record_of_the_wrong_types_is_refused(run: Path, change: dict[str, Any]) -> None:
    file = run / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"environment\.json is not the record of a run: {next(iter(change))}"):
        find_resumable(run)


def test_arithmetic_that_this_machine_lacks_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = find_resumable(run)
    assert stored is not None
    directory = RunDirectory.open(run)
    write_run_config(
        directory, stored.config.replace(training=stored.config.training.replace(compile=True).model_dump())
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DeviceError, match=r"uses training\.compile = true, but no C"):
        resume(run, "training.max_steps=6")
    assert steps(run) == 4


def test_text_that_is_not_there_says_from_where_and_how_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    require_text(run, ["corpus"])
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(DataError, match=f"reads corpus, which was not found from {tmp_path / 'run'}.*--data"):
        require_text(run, ["corpus"])


def test_a_run_without_its_record_says_how_to_begin_with_its_weights(run: Path) -> None:
    (run / "environment.json").unlink()
    with pytest.raises(CheckpointError, match=r"environment\.json is missing, .*--fork"):
        find_resumable(run)
