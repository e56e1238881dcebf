"""Files that SheepOp 0.1 wrote, in every version of every format, are read, and mean what they meant.

``files-0.1.tar.xz`` has what earlier states of the program wrote: the first one with versions (names that end in
``first``), a later one (``second``), and the last one before 0.2 (``int4``). Pages and pictures are left out, also in
the lists of checksums, and so are training states that no test needs. ``expected.json`` has what those programs
computed from them.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.checkpoint import memory_file, model_description, run_directory
from sheepop.checkpoint.model_directory import load_model
from sheepop.core import measurements
from sheepop.core.files import read_json
from sheepop.data import Corpus, manifest
from sheepop.evaluate import report
from sheepop.interpret import store
from sheepop.jobs.run.listing import find_runs
from sheepop.posttrain import example_store

from ..command_line import in_process

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
MODELS = {"run-first": 1, "run-second": 1, "int8": 2, "adapter-second": 3, "int4": 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    with tarfile.open(Path(__file__).with_name("files-0.1.tar.xz")) as archive:
        archive.extractall(place, filter="data")
    return place


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files / "expected.json").read_text())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_of_0_1_write_what_they_wrote(files: Path, expected: dict[str, Any], name: str):
    lm = sheepop.load(files / name, device="cpu")
    written, version = expected["written"][name], read_json(_model(files / name) / "config.json")["format_version"]
    assert version == MODELS[name]
    found = lm.generate("Line 1", max_new_tokens=len(written["token_ids"]), temperature=0)
    assert list(found.token_ids) == written["token_ids"]
    assert found.logprobs == pytest.approx(written["logprobs"], abs=2e-5)


@pytest.mark.parametrize(("name", "version"), [("run-first", 1), ("run-second", 2)])
def test_runs_of_0_1_go_on_as_they_did(
    files: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: int
):
    assert read_json(_model(files / name) / "state" / "state.json")["format_version"] == version
    for part in (name, name.replace("run", "corpus")):
        shutil.copytree(files / part, tmp_path / part)
    monkeypatch.chdir(tmp_path)
    losses = expected["resumed"][name]
    done = in_process("train", "--resume", name, f"training.max_steps={len(losses)}", "--device", "cpu", "--quiet")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if row["split"] == "validation"] == pytest.approx(losses, abs=1e-5)


def test_other_files_of_0_1_are_read(files: Path, expected: dict[str, Any]):
    for corpus, version in (("corpus-first", 2), ("corpus-second", 3)):
        assert read_json(files / corpus / "manifest.json")["format_version"] == version
        opened = Corpus.open(files / corpus)
        run = corpus.replace("corpus", "run")
        assert opened.fingerprint == read_json(files / run / "environment.json")["corpus_fingerprint"]
        assert sum(len(document.text) for document in opened.documents("train")) == 3070
    tokenizer = sheepop.load_tokenizer(files / "tokenizer-first")
    assert tokenizer.encode("Line 4 counts 17 sheep.") == expected["tokens"]

    lm = sheepop.load(files / "run-second", device="cpu")
    trace = store.StoredTrace.open(files / "trace-second")
    with torch.inference_mode():
        logits = lm.model(torch.tensor([lm.tokenizer.encode(trace.manifest["prompt"])]))[0]
    torch.testing.assert_close(trace.read("logits"), logits, atol=1e-5, rtol=0)

    (scores,) = report.read_report(files / "evaluation")
    assert {measure.name: measure.value for measure in scores.evaluations[0].measures}["loss"] == 4.454153005282084
    judge = load_model(files / "reward-second").model
    assert read_json(_model(files / "reward-second") / "config.json")["format_version"] == 4
    assert judge.reward_head.weight.shape == (1, 32)
    examples = example_store.ExampleStore.open(files / "reward-second" / "examples" / "tokens")
    assert examples.train.num_groups + examples.validation.num_groups == 4


def test_runs_of_0_1_are_listed(files: Path):
    found, left_out = find_runs([files])
    assert len(found) == 4
    assert set(left_out.values()) == {"not a run"}


def test_measurements_of_0_1_are_made_again(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An entry is one for the version that measured; the others stay in the file for a program of that version."""
    remembered = tmp_path / "measurements.json"
    remembered.write_bytes((files / "measurements.json").read_bytes())
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(remembered))
    before = json.loads(remembered.read_text())
    *hardware, versions, digest = json.loads(next(iter(before)))
    assert versions["sheepop"] == "0.1.0"
    key = json.dumps([*hardware, {**versions, "sheepop": sheepop.__version__}, digest])
    assert measurements.recall(key, float) is None
    measurements.remember(key, 1.0)
    assert json.loads(remembered.read_text()) == {**before, key: 1.0}


def test_the_table_of_formats_is_that_of_the_code():
    rows = {cells[0]: cells[3:5] for line in PAGE.read_text().splitlines() if len(cells := _cells(line)) == 6}
    newest = {
        "model, checkpoint": model_description.FORMAT_VERSION,
        "training state": run_directory.FORMAT_VERSION,
        "corpus": manifest.FORMAT_VERSION,
        "examples of a tuned run": example_store.FORMAT_VERSION,
        "trace": store.FORMAT_VERSION,
        "evaluation": report.FORMAT_VERSION,
        "memory of the training text": memory_file.FORMAT_VERSION,
    }
    assert {name: [int(re.findall(r"\d+", cell)[-1]) for cell in rows[name]] for name in newest} == {
        name: [version, version] for name, version in newest.items()
    }
    assert rows["record of a run"][0] == sheepop.__version__


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _model(place: Path) -> Path:
    steps = sorted((place / "checkpoints").glob("step-*"))
    return steps[-1] if steps else place
