"""What happens around a run while it trains: a disk that turns read-only, a second process, data that vanishes, a sink
that hangs. Each costs one clear paragraph at most, and no checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.files import damaged_files

Reference = Any


def assert_one_paragraph(errors: str, *parts: str) -> None:
    """An error of one line that says these things."""
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1, errors
    for part in parts:
        assert part in errors, errors


def assert_whole(run: Path, latest: int) -> None:
    directory = RunDirectory.open(run)
    assert directory.pointer("latest") == latest
    assert [problem for step in directory.steps() for problem in damaged_files(directory.checkpoint(step))] == []


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nobody can write there within the block, nor can root."""
    if os.geteuid() != 0:
        directory.chmod(0o555)
        try:
            yield
        finally:
            directory.chmod(0o755)
        return
    bind = ["mount", "--bind", str(directory), str(directory)]
    if shutil.which("mount") is None or subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount, and nothing else keeps it from writing")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def refusal() -> str:
    """Why nothing could be written there."""
    return "the file system is read-only" if os.geteuid() == 0 else "permission is denied"


# The middle of the fifth checkpoint, that of step 15; four, the last of step 10, are on the disk by then.
FIFTH_CHECKPOINT = ("sheepop.checkpoint.training_state", "write_part", 5)
THIRTEENTH_STEP = ("sheepop.train.step", "StepRunner.gradients", 13)


def test_a_directory_of_checkpoints_that_turns_read_only(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with reference.halted(*FIFTH_CHECKPOINT, reference.options(run)) as process, read_only(run / "checkpoints"):
        code, said = process.go_on()
        assert code == 1
        assert_one_paragraph(said, "step-00000015", refusal(), "up to step 10 is saved", f"--resume {run}")
        before = (run / "metrics.jsonl").read_bytes()
        too_early = reference.finished(reference.options(run, resume=True))
        assert too_early.code == 1
        assert_one_paragraph(too_early.err, f"Cannot write {run / 'checkpoints'}", refusal())
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_whole(run, latest=10)
    reference.resume(run)


def test_a_second_process_on_a_run_is_refused_and_disturbs_nothing(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with reference.halted(*THIRTEENTH_STEP, reference.options(run)) as process:
        for option in (["--resume", "auto"], ["--overwrite"]):
            second = reference.finished([*reference.options(run), *option])
            assert second.code == 3
            assert_one_paragraph(second.err, f"Another process is working on the run in {run}")
        assert process.go_on() == (0, "")
    reference.require_equal(run)


def test_data_that_vanishes_while_a_run_trains(reference: Reference, tmp_path: Path) -> None:
    run, corpus = tmp_path / "run", Path(shutil.copytree(reference.path / "corpus", tmp_path / "corpus"))
    with reference.halted(*THIRTEENTH_STEP, reference.options(run, data=corpus)) as process:
        (corpus / "tokens").rename(tmp_path / "aside")
        code, said = process.go_on()
    assert code == 3
    assert_one_paragraph(said, "train-00000.bin has disappeared since it was opened", "--resume")
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    assert_whole(run, latest=json.loads(metrics[-1])["step"])
    still_gone = reference.finished(reference.options(run, data=corpus, resume=True))
    assert still_gone.code == 3
    assert "train-00000.bin is missing" in still_gone.err
    assert (run / "metrics.jsonl").read_text().splitlines() == metrics
    (tmp_path / "aside").rename(corpus / "tokens")
    reference.resume(run, data=corpus)


def test_a_sink_that_hangs_keeps_no_run_from_its_end(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = reference.options(run, "training.sinks=[tensorboard]")
    write = ("sheepop.train.sinks", "TensorBoard.write", 5)
    done = reference.disturbed("time.sleep(10**6)", *write, options).wait()
    assert done.code == 0
    assert "TensorBoard did not finish in time and was given up" in done.err
    assert "metrics.jsonl has all of them" in done.err
    reference.require_equal(run)
