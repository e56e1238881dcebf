"""A disk that fills up while a checkpoint is written: a clear error, and the checkpoints before it intact."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sheepop.checkpoint import RunDirectory
from sheepop.core.files import damaged_files

from ..command_line import Launcher

# A network large enough for a few of its checkpoints to fill the disk, and a checkpoint at every step.
LARGER = ("model.d_model=64", "model.num_layers=2", "training.max_steps=10")
AT_EVERY_STEP = ("training.checkpoint_interval=1", "training.keep_checkpoints=20")


def test_a_full_disk_loses_nothing_that_was_saved(
    launcher: Launcher, small_disk: Path, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sheep number {number} jumps over the fence.\n" for number in range(200)))
    run = small_disk / "run"
    places = ("--data", str(text), "--output", str(run), "--device", "cpu", "--quiet")
    arguments = ["train", *places, *tiny, *LARGER, *AT_EVERY_STEP]
    full = launcher.run(*arguments)
    assert full.code == 1
    assert full.err.count("\n") == 1, full.err
    assert "the disk is full" in full.err
    directory = RunDirectory.open(run)
    steps = directory.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert 0 < len(steps) < 10
    assert all(not damaged_files(directory.checkpoint(step)) for step in steps)

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = launcher.run(*arguments, "--resume", "auto")
    assert resumed.code == 0, resumed.err
    assert directory.pointer("latest") == 10
