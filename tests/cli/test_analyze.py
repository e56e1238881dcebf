"""``sheepop analyze``: what it prints and writes is what the Python API finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sheepop

Run = Callable[..., Any]
FEW = ("--probes", "4")
PNG = b"\x89PNG\r\n\x1a\n"

VERBS = {
    "gains": (("--steps", "8"), {"gains_by_block", "gains_of_parts", "gains_in_nats"}),
    "influence": ((), {"influence", "influence_rollout", "influence_attention"}),
    "impulse": (("--position", "1"), {"impulse"}),
    "state-space": (("--candidates", "2"), {"state_space"}),
    "blocks": (("--fed", "2"), {"blocks", "blocks_inside"}),
    "compare": ((), {"compare"}),
}
# Those of a loop: what each reads beside a run, and its pictures.
LOOPS = {
    "decode": (("Sheep", "--length", "6", "--pairs", "2"), {"decode"}),
    "sharpness": (("--products", "3", "--rows", "2"), {"sharpness"}),
    "noise": (("--batches", "2"), set[str]()),
    "coordinates": (("--width", "8", "--width", "16", "--width", "32", "--steps", "1"), {"coordinates"}),
    "rate": ((), {"rate"}),
    "advice": ((), set[str]()),
}


def models(verb: str, trained: Path) -> tuple[Path, ...]:
    return (trained, trained) if verb == "compare" else (trained,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("analysis") / "all"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_and_writes_its_finding(run: Run, trained: Path, folder: Path, verb: str) -> None:
    options, pictures = VERBS[verb]
    common = (*models(verb, trained), "Sheep", *options, *FEW, "--device", "cpu")
    ended = run("analyze", verb, *common, "--output", folder)
    assert ended.code == 0, ended.err
    stored = json.loads((folder / f"{verb}.json").read_text())
    assert stored["analysis"] == verb and stored["tokens"] == [*"Sheep"]
    for sentence in (*stored["sentences"], *stored["notes"]):
        assert sentence in ended.out
    assert f"Written: {folder}" in ended.err
    for name in pictures:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (folder / f"{name}.svg").read_text()


@pytest.fixture(scope="module")
def watched(run: Run, text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("watched") / "run"
    measured = ("analysis.quantities=[sharpness,noise,layers]", "analysis.interval=2")
    ended = run("train", "--data", text_folder, "--output", output, "--quiet", *tiny, *measured, "device=cpu")
    assert ended.code == 0, ended.err
    return output


@pytest.mark.parametrize("verb", LOOPS)
def test_every_loop_prints_and_writes_its_finding(run: Run, watched: Path, folder: Path, verb: str) -> None:
    options, pictures = LOOPS[verb]
    before = {path: path.stat().st_mtime_ns for path in watched.rglob("*")}
    ended = run("analyze", verb, watched, *options, "--output", folder)
    assert ended.code == 0, ended.err
    stored = json.loads((folder / f"{verb}.json").read_text())
    assert stored["analysis"] == verb and stored["sentences"]
    for sentence in (*stored["sentences"], *stored["notes"]):
        assert sentence in ended.out
    assert all((folder / f"{name}.png").read_bytes().startswith(PNG) for name in pictures)
    assert {path: path.stat().st_mtime_ns for path in watched.rglob("*")} == before


def test_a_healthy_run_has_no_advice_to_try(run: Run, watched: Path) -> None:
    assert "The analysis of this run gives no advice." in run("analyze", "advice", watched).out
    refused = run("analyze", "advice", watched, "--try")
    assert refused.code == 2 and "There is no advised change of a setting to try" in refused.err


def test_a_finding_is_replaced_only_when_asked(run: Run, trained: Path, tmp_path: Path) -> None:
    common = ("analyze", "impulse", trained, "Sheep", *FEW, "--device", "cpu", "--output", tmp_path)
    (tmp_path / "impulse.json").write_text("mine")
    refused = run(*common)
    assert refused.code == 2 and "impulse.json already exists" in refused.err
    assert (tmp_path / "impulse.json").read_text() == "mine"
    printed = json.loads(run(*common, "--overwrite", "--json").out)
    assert json.loads((tmp_path / "impulse.json").read_text()) == printed


def test_python_finds_the_same(run: Run, trained: Path) -> None:
    printed = json.loads(
        run("analyze", "gains", trained, "Sheep", "--steps", "8", *FEW, "--device", "cpu", "--json").out
    )
    lm = sheepop.load(trained, device="cpu")
    assert lm.analyze.gains("Sheep", steps=8, probes=4).to_dict() == printed
    assert "float32" in printed["notes"][0]
    twice = json.loads(run("analyze", "impulse", trained, "Sheep", "--dtype", "float64", *FEW, "--json").out)
    assert "float64" in twice["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("gains",), 2, "Give one prompt, as TEXT or with --prompt"),
        (("gains", "Sheep" * 20), 2, "The prompt has 100 tokens, but the model reads 32"),
        (("gains", "Sheep", "--dtype", "bfloat16"), 2, "dtype must be float32 or float64, not 'bfloat16'"),
        (("impulse", "Sheep", "--position", "9"), 2, "--position 9 is outside the prompt"),
        (("blocks", "Sheep", "--layer", "7"), 2, "--layer 7 does not exist"),
    ],
)
def test_what_cannot_be_analysed_is_refused(
    run: Run, trained: Path, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    verb, *rest = arguments
    ended = run("analyze", verb, trained, *rest, "--device", "cpu")
    assert (ended.code, ended.out) == (code, "") and problem in ended.err, ended.err
    assert "Traceback" not in ended.err
