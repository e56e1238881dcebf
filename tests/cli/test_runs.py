"""``sheepop runs`` and the options of ``sheepop train`` that look at training, as a user calls them."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    for name in ("first", "second"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_as_a_table_and_as_json(run: Any, folder: Path) -> None:
    done = run("runs", folder)
    assert done.code == 0
    head, *rows = [line.split() for line in done.out.splitlines()]
    assert head[:3] == ["Run", "State", "Parameters"]
    assert [row[:2] for row in rows] == [["first", "finished"], ["second", "finished"]]
    assert rows[0][3:6] == ["6", "of", "6"]
    assert done.err == f"Left out: {folder / 'other'}: not a run\n"
    listed = json.loads(run("runs", folder, "--json").out)
    assert [found["name"] for found in listed["runs"]] == ["first", "second"]
    assert f"{listed['runs'][0]['best_loss']:.4f}" == rows[0][-2]


def test_the_next_command_of_a_finished_run_runs(
    run: Any, text_folder: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    done = run("train", "--data", text_folder, "--output", tmp_path / "a run", *tiny)
    (words,) = (line.removeprefix("Next: ") for line in done.out.splitlines() if line.startswith("Next: "))
    program, *arguments = shlex.split(words)
    assert (program, *arguments[:3]) == ("sheepop", "generate", str(tmp_path / "a run"), "--prompt")
    tried = run(*arguments)
    assert tried.code == 0, tried.err
    assert tried.out.startswith(arguments[3])


def test_the_name_of_a_run_cannot_command_the_terminal(run: Any, folder: Path) -> None:
    (folder / "second").rename(folder / "red\x1b[31m\nname")
    shown = run("runs", folder).out
    assert "red\\x1b[31m⏎name" in shown
    assert len(shown.splitlines()) == 3


def test_two_runs_are_compared(run: Any, folder: Path, tmp_path: Path) -> None:
    done = run("runs", folder / "first", folder / "second", "--output", tmp_path / "out")
    assert done.code == 0
    assert "All settings are the same." in done.out
    assert done.out.splitlines()[-1] == f"Page: {tmp_path / 'out' / 'comparison.html'}"
    assert run("runs", folder, "--output", tmp_path / "no").code == 2
    assert run("runs", folder / "other").out.startswith("No runs.")


def test_a_profile_is_part_of_the_run(
    run: Any, tiny: tuple[str, ...], text_folder: Path, tmp_path: Path, trained: Path
) -> None:
    output = tmp_path / "run"
    done = run("train", "--data", text_folder, "--output", output, "--profile", "--profile-steps", 2, *tiny)
    assert done.code == 0
    assert {entry.name for entry in (output / "profile").iterdir()} == {"trace.json", "operations.txt"}
    one, two = (
        (place / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes() for place in (trained, output)
    )
    assert one == two
    RunDirectory.create(output, overwrite=True)  # nothing in it is foreign


def test_a_range_test_has_no_place_beside_a_resumed_run(run: Any, trained: Path) -> None:
    done = run("train", "--resume", trained, "--find-learning-rate")
    assert done.code == 2
    assert "--find-learning-rate starts no run" in done.err
    assert run("train", "--fork", trained, "--find-learning-rate").err == done.err


def test_early_stopping_without_held_out_text_is_refused(
    run: Any, tiny: tuple[str, ...], text_folder: Path, tmp_path: Path
) -> None:
    settings = ("training.early_stopping=2", "data.validation_fraction=0")
    done = run("train", "--data", text_folder, "--output", tmp_path / "run", *tiny, *settings)
    assert done.code == 2
    assert "no text is held out" in done.err
