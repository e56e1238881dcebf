"""What stands in the report of a run, read back from the page."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import typer
import yaml

from sheepop.checkpoint import RunDirectory
from sheepop.cli.main import app
from sheepop.core.config import dump_config, validate
from sheepop.core.console import Console
from sheepop.data import DataConfig, build_corpus
from sheepop.evaluate.baselines import Baselines
from sheepop.generate import Completion
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.open import task_of
from sheepop.jobs.run.record import Budget, RunRecord, view_run_config
from sheepop.jobs.run.report import write_run_report
from sheepop.model import build_model
from sheepop.tokenizer import TokenizerConfig
from sheepop.train import TokenScores

HOSTILE = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "link", "br"}


class ReadPage(HTMLParser):
    """Texts by tag, facts by label within their section, tables as rows, and the data of the charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.facts: dict[str, dict[str, str]] = {}
        self.rows: list[list[str]] = []
        self.charts: list[dict[str, Any]] = []
        self._open: list[tuple[str, list[str], str]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in VOID:
            self.texts.setdefault(tag, []).append("")
        else:
            self._open.append((tag, [], dict(attrs).get("type") or ""))

    def handle_data(self, data: str) -> None:
        for _, pieces, _ in self._open:
            pieces.append(data)

    def handle_endtag(self, tag: str) -> None:
        opened, pieces, kind = self._open.pop()
        assert opened == tag
        text = "".join(pieces)
        self.texts.setdefault(tag, []).append(text)
        if tag == "dd":
            section = self.texts.get("h2", [""])[-1]
            self.facts.setdefault(section, {})[self.texts["dt"][-1]] = text
        elif tag in ("td", "th"):
            self.rows[-1].append(text)
        elif kind == "application/json":
            self.charts.append(json.loads(text))


@pytest.fixture
def record() -> RunRecord:
    machine = {
        "processor": "A processor",
        "memory": 16_000_000_000,
        "cores": 2.0,
        "accelerators": [{"kind": "cuda", "name": "A card", "memory": 8_000_000_000}],
        "compiler": None,
        "versions": {"torch": "2.12.0", "numpy": "2.1.0"},
    }
    return RunRecord("0.1.0", "c" * 64, "t" * 64, 93e9, 0.1432, {}, machine, nominal_peak_flops=989.4e12)


@pytest.fixture
def config() -> SheepOpConfig:
    model = {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
    return validate(SheepOpConfig, {"model": model, "training": {"max_steps": 100}})


@pytest.fixture
def run(tmp_path: Path, config: SheepOpConfig) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "my-run")
    run.config_file.write_text(dump_config(config), encoding="utf-8")
    return run


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_row(step: int, **values: Any) -> dict[str, Any]:
    row = {"step": step, "split": "train", "loss": 10.0 / step, "learning_rate": 1e-3, "grad_norm": 1.0}
    return {**row, "tokens": step * 128, "tokens_per_second": 900.0, "mfu": 0.4, "seconds": step * 2.5, **values}


def report(
    run: RunDirectory,
    scores: TokenScores | None,
    record: RunRecord,
    manifest: Mapping[str, Any] = MappingProxyType({"examples": {}}),
    **rest: Any,
) -> None:
    write_run_report(run, view_run_config(run), scores, record, manifest, **rest)


def read(run: RunDirectory) -> ReadPage:
    return ReadPage((run.path / "report.html").read_text(encoding="utf-8"))


SCORES = TokenScores(
    loss=1.5, perplexity=math.exp(1.5), accuracy=0.5312, bits_per_byte=0.78125, tokens=4321, bytes=12345
)
BASELINES = Baselines(warm_xz=1.5, xz=1.875, gzip=2.125, bytes=12400, training_bytes=99000)


def test_a_report_says_what_a_busy_machine_cost(run: RunDirectory, record: RunRecord) -> None:
    write_lines(run.metrics_file, [train_row(step) for step in (10, 20)])
    share = "Other programs kept this machine busy"
    for deadline, cost in (
        (None, "took about 2.5 times as long as alone."),
        (Budget(60.0, None), "took 20 steps; alone it would have taken about 50."),
    ):
        report(run, None, replace(record, processor_share=0.4, deadline=deadline))
        assert f"{share}: training got 40% of the processor time and {cost}" in read(run).texts["p"]
    report(run, None, replace(record, processor_share=0.95))
    assert share not in " ".join(read(run).texts["p"])


def test_a_report_gives_advice_after_overfitting(run: RunDirectory, record: RunRecord) -> None:
    losses = {10: 3.0, 20: 2.0, 30: 2.1}
    held_out = [{"step": step, "split": "validation", "loss": loss} for step, loss in losses.items()]
    write_lines(run.metrics_file, held_out)
    report(run, None, record)
    (advice,) = [words for words in read(run).texts["p"] if "by heart" in words]
    assert advice.startswith("The held-out loss was lowest at step 20 (2.000) and then rose to 2.100: ")
    assert "training.early_stopping=3" in advice
    write_lines(run.metrics_file, held_out[:2])
    report(run, None, record)
    assert not [words for words in read(run).texts["p"] if "by heart" in words]


def test_report_of_a_finished_run(run: RunDirectory, record: RunRecord, config: SheepOpConfig) -> None:
    rows = [train_row(step) for step in range(10, 101, 10)]
    held_out = {"step": 100, "split": "validation", "loss": 1.5, "bits_per_byte": 0.8, "tokens": 12800}
    write_lines(run.metrics_file, [*rows, held_out])
    write_lines(run.samples_file, [{"step": 50, "prompt": "a", "text": "  b\n\tc"}])
    completion = Completion("ing\n  text", [5, 6, 7], "length", [0.0] * 3, "Writ", 2, 0, 11)
    before = {"Training": 150.0, "Writing": 2.0}
    asked = {"model": {"d_model": 32, "num_layers": 6}, "seed": 0}
    record = replace(record, command="sheepop train --data notes", requested=asked, stage_seconds=before)
    record = record.with_times({"Training": 100.0})
    report(run, SCORES, record, baselines=BASELINES, completions=[completion])
    page = read(run)
    assert page.texts["h1"] == ["Training run my-run"]
    parameters = sum(parameter.numel() for parameter in build_model(config.model, 0).parameters())
    assert page.facts[""] == {
        "Bits per byte of held-out text": "0.7812",
        "Parameters": f"{parameters:,}",
        "Steps": "100 of 100",
        "Tokens trained on": "12,800",
        "Training time": "4 min 10 s",
        "Best checkpoint": "–",
    }
    assert page.facts["Held out"] == {
        "Bits per byte": "0.7812",
        "Loss (nats per token)": "1.5000",
        "Perplexity": "4.48",
        "Next-token accuracy": "53.1%",
        "Tokens predicted": "4,321",
        "Bytes predicted": "12,345",
    }
    assert page.rows == [
        ["Predictor", "Bits per byte"],
        ["gzip -9", "2.1250"],
        ["xz -9", "1.8750"],
        ["xz -9 that has read the training text", "1.5000"],
        ["▸ this model", "0.7812"],
    ]
    assert page.texts["pre"][:2] == ["Writing\n  text", "a  b\n\tc"]
    assert "3 tokens, stopped at the length limit, seed 11" in page.texts["figcaption"]
    assert "step 50" in page.texts["figcaption"]
    assert page.facts["Model"]["Layers"] == "2"
    assert page.facts["Model"]["Feed-forward width"] == "128"
    command, asked_for, settings = page.texts["code"]
    assert command == "sheepop train --data notes"
    assert yaml.safe_load(asked_for) == {"model": {"d_model": 32}}  # the others are at their defaults
    assert settings == run.config_file.read_text(encoding="utf-8")
    loss, bits, rate, norm, speed, stages = page.charts
    assert loss["data"][0]["y"] == [row["loss"] for row in rows]
    names = ["This model", "xz -9 that has read the training text", "xz -9", "gzip -9"]
    assert [trace["name"] for trace in bits["data"]] == names
    assert [trace["y"] for trace in bits["data"][1:]] == [[1.5, 1.5], [1.875, 1.875], [2.125, 2.125]]
    assert [chart["data"][0]["y"][0] for chart in (rate, norm, speed)] == [1e-3, 1.0, 900.0]
    assert stages["data"][0]["x"] == [250.0, 2.0]
    assert (run.plots / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_machine_and_versions(run: RunDirectory, record: RunRecord) -> None:
    report(run, None, record)
    facts = read(run).facts["Machine"]
    assert facts == {
        "Processor": "A processor",
        "Memory": "16 GB",
        "Cores": "2",
        "Accelerators": "A card (8 GB)",
        "Compiler": "–",
        "Matrix speed, measured": "93 GFLOP/s",
        "Matrix speed, from the data sheet": "989 TFLOP/s",
        "Step time, measured at the start": "0.1432 s",
        "sheepop": "0.1.0",
        "torch": "2.12.0",
        "numpy": "2.1.0",
        "Corpus": "c" * 64,
        "Tokenizer": "t" * 64,
    }


def test_counts_of_the_corpus(run: RunDirectory, record: RunRecord, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"Text number {number} is here.\n" * 5, encoding="utf-8")
    (folder / "again.txt").write_text((folder / "0.txt").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "nothing.txt").touch()
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 8)
    data = DataConfig(paths=(str(folder),), validation_fraction=0.2)
    tokenizer = TokenizerConfig(algorithm="char")
    corpus = build_corpus(data, tokenizer, run.corpus, seed=0, console=Console.silent())
    report(run, None, record, corpus.manifest)
    page = read(run)
    facts = page.facts["Data"]
    assert (facts["Inputs"], facts["Files found"], facts["Files read"]) == ("text", "33", "31")
    assert (facts["Documents found"], facts["Documents kept"]) == ("31", "30")
    assert ["exact duplicates", "1"] in page.rows
    splits = {row[0]: row[1:4] for row in page.rows}
    for name, split in (("Training", corpus.train), ("Held out", corpus.validation)):
        assert splits[name] == [f"{n:,}" for n in (split.num_documents, split.num_tokens, split.num_bytes)]
    skipped = {reason: count for kind, reason, count in (row for row in page.rows if len(row) == 3) if kind == "files"}
    assert sum(int(count) for count in skipped.values()) == 2
    assert corpus.manifest["split"]["words"] in page.texts["p"]


def test_counts_of_a_finished_corpus_that_was_given(
    run: RunDirectory, record: RunRecord, tmp_path: Path, config: SheepOpConfig
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"Line {number} of a text.\n" for number in range(200)), encoding="utf-8")
    given = tmp_path / "corpus"
    build_corpus(DataConfig(paths=(str(text),)), TokenizerConfig(algorithm="char"), given, seed=0)
    config = config.replace(data={"paths": [str(given)]})
    report(run, None, record, task_of(config, run, Console.silent()).manifest)
    assert read(run).facts["Data"]["Files read"] == "1"


def test_run_stopped_before_its_first_step(run: RunDirectory, record: RunRecord) -> None:
    report(run, None, record)
    page = read(run)
    assert page.facts[""]["Steps"] == "0 of 100"
    assert page.facts[""]["Tokens trained on"] == "–"
    assert page.charts == []
    assert "script" not in page.texts
    assert "The run has no finished steps yet." in page.texts["p"]
    assert (run.plots / "curves.png").is_file()


def test_stopped_run_shows_its_last_validation(run: RunDirectory, record: RunRecord) -> None:
    row = {"step": 30, "split": "validation", "loss": 2.0, "perplexity": None, "accuracy": 0.25, "bits_per_byte": 1.5}
    write_lines(run.metrics_file, [train_row(30), {**row, "tokens": 999, "seconds": 1.0}])
    report(run, None, record)
    page = read(run)
    assert page.facts["Held out"] == {
        "Bits per byte": "1.5000",
        "Loss (nats per token)": "2.0000",
        "Perplexity": "–",
        "Next-token accuracy": "25.0%",
    }
    assert any("stopped after step 30 of 100" in text for text in page.texts["p"])


def test_a_stopped_run_names_the_command_that_goes_on_with_it(tmp_path: Path, config: SheepOpConfig) -> None:
    run = RunDirectory.create(tmp_path / "my run's folder")
    run.config_file.write_text(dump_config(config), encoding="utf-8")
    write_lines(run.metrics_file, [train_row(30)])
    report(run, None, RunRecord("0.1.0", "c" * 64, "t" * 64, 93e9, None, {}, {}))
    (words,) = (text for text in read(run).texts["p"] if "stopped after step 30 of 100" in text)
    program, *arguments = shlex.split(words.partition("Resume it with: ")[2])
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    name, command, rest = commands.resolve_command(commands.make_context("sheepop", list(arguments)), arguments)
    assert (program, name) == ("sheepop", "train") and command is not None
    assert command.make_context(name, rest).params["resume"] == str(run.path)


def test_damaged_lines_are_left_out_and_counted(run: RunDirectory, record: RunRecord) -> None:
    good = json.dumps(train_row(10)).encode()
    deep = b"[" * 100_000
    run.metrics_file.write_bytes(b"\n".join([good, b"\xff\xfe\x00", b"[1]", deep, good[:-20]]))
    run.samples_file.write_bytes(b'{"step": null, "prompt": 5}\n{"step": 2, "prom')
    report(run, None, record)
    page = read(run)
    assert page.charts[0]["data"][0]["x"] == [10]
    assert "Unreadable lines of metrics.jsonl, left out here: 4." in page.texts["p"]
    assert "Unreadable lines of samples.jsonl, left out here: 1." in page.texts["p"]
    assert page.texts["pre"][0] == "5–"


@pytest.mark.parametrize("value", [None, "x", [], {"a": 1}, True, 10**400])
def test_values_of_any_kind_give_a_report(run: RunDirectory, record: RunRecord, value: Any) -> None:
    bad = dict.fromkeys(train_row(1), value)
    odd = {**bad, "split": "validation", "perplexity": value, "accuracy": value, "bits_per_byte": value}
    rows = [bad, {**bad, "split": "train"}, odd]
    write_lines(run.metrics_file, rows)
    write_lines(run.samples_file, [{"step": value, "prompt": value, "text": value}])
    report(run, None, record)
    assert read(run).facts["Held out"]["Bits per byte"] == "–"


@pytest.mark.parametrize("text", ["model: [", "model:\n  d_model: -1\n", "\x00\x01", ""])
def test_config_that_cannot_be_used_is_shown_as_it_is(
    run: RunDirectory, record: RunRecord, config: SheepOpConfig, text: str
) -> None:
    run.config_file.write_text(text, encoding="utf-8")
    write_run_report(run, config, SCORES, record, {})
    page = read(run)
    assert page.texts["code"][-1] == text.translate({0: "\u2400", 1: "\u2401"})


def test_manifest_with_odd_entries_gives_a_report(run: RunDirectory, record: RunRecord) -> None:
    manifest = {"format": "sheepop corpus", "format_version": 1, "files": [], "documents": {"in": {}}}
    report(run, None, record, {**manifest, "tokens": {"splits": {"train": 5}}, "split": None})
    page = read(run)
    assert page.facts["Data"]["Files found"] == "–"
    assert ["Training", "–", "–", "–", "–"] in page.rows


def test_only_the_last_samples_are_shown_and_the_page_says_so(run: RunDirectory, record: RunRecord) -> None:
    write_lines(run.samples_file, [{"step": step, "prompt": "p", "text": str(step)} for step in range(1, 41)])
    report(run, None, record)
    page = read(run)
    assert page.texts["pre"][:2] == ["p1", "p40"]  # the first and the last, beside each other at the top
    assert page.texts["pre"][2:14] == [f"p{step}" for step in range(29, 41)]
    assert "The last 12 of 40; all of them are in samples.jsonl." in page.texts["p"]


def test_hostile_text_stays_text(run: RunDirectory, record: RunRecord) -> None:
    write_lines(run.samples_file, [{"step": 1, "prompt": HOSTILE, "text": HOSTILE + "\ud800"}])
    run.config_file.write_text(f"# {HOSTILE}\n", encoding="utf-8")
    record.machine["processor"] = HOSTILE
    done = Completion(HOSTILE, [1], "stop", [0.0], HOSTILE, 1, 0, 0)
    record = replace(record, command=HOSTILE, requested={HOSTILE: HOSTILE}, stage_seconds={HOSTILE: 1.0})
    report(run, None, record, completions=[done])
    page = read(run)
    assert "img" not in page.texts
    assert page.texts["pre"][:2] == [HOSTILE * 2, HOSTILE * 2 + "\ufffd"]
    assert page.facts["Machine"]["Processor"] == HOSTILE


def test_seed_revision_and_resumptions_are_shown(run: RunDirectory, record: RunRecord) -> None:
    session = {"step": 40, "time": "2026-02-04T05:06:07.000001+00:00", "git": {"commit": "e" * 40, "dirty": False}}
    complete = replace(
        record,
        seed=7,
        started="2026-02-03T04:05:06.000001+00:00",
        git={"commit": "d" * 40, "dirty": True},
        compute={"device": "cuda", "threads": 8, "cuda": "13.0", "cudnn": None},
        resumed=[session],
    )
    report(run, None, complete)
    page = read(run)
    expected = {
        "Started (UTC)": "2026-02-03 04:05:06",
        "Seed": "7",
        "Commit of the working directory": "d" * 40,
        "Its tracked files": "changed since",
        "Device": "cuda",
        "Threads": "8",
        "Cuda": "13.0",
    }
    assert expected.items() <= page.facts["Machine"].items()
    assert "Cudnn" not in page.facts["Machine"]
    assert ["2026-02-04 05:06:07", "40", "e" * 40] in page.rows


def test_a_run_that_ended_early_says_why(run: RunDirectory, record: RunRecord) -> None:
    model = {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64}
    tree = {"model": model, "training": {"max_steps": 100, "early_stopping": 3}}
    run.config_file.write_text(dump_config(validate(SheepOpConfig, tree)))
    state = run.checkpoint(40) / "state"
    state.mkdir(parents=True)
    counters = {"format_version": 1, "counters": {"step": 40, "stale_validations": 3}, "optimizer_scalars": {}}
    (state / "state.json").write_text(json.dumps(counters))
    report(run, None, record)
    words = " ".join(read(run).texts["p"])
    assert "The run is finished. It ended early, after step 40 of 100: 3 validations in a row" in words
    assert "Resume it with" not in words
