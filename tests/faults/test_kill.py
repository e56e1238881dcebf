"""A run that is killed, wherever it stands, goes on to the same bits as the run that was not."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.run_directory import CARD

Reference = Any


# Functions, and the call of each at which a session is killed.
KILLS = [
    ("sheepop.core.json_lines", "JsonLines.append", 8),  # before a line of the log
    ("sheepop.train.optimizers.momentum", "Muon.step", 8),  # in an update
    ("sheepop.train.loop", "Trainer._validate", 1),  # before a validation
    ("sheepop.core.files", "write_checksums", 2),  # in a checkpoint that is almost written
    ("sheepop.checkpoint.run_directory", "RunDirectory._point", 3),  # between a checkpoint and its pointer
    ("sheepop.checkpoint.run_directory", "remove_tree", 2),  # while old checkpoints are removed
    ("torch.autograd", "backward", 2 * 3 + 1),  # between the two micro-batches of a step
]


def test_killed_in_the_middle_of_anything(reference: Reference, tmp_path: Path) -> None:
    """Each session goes on from where the one before was killed; a later one hides nothing before its checkpoint.

    Checkpoints are written in the background, so the newest one may be of the last interval or of the one before.
    """
    run, newest = tmp_path / "run", 0
    for module, name, count in KILLS:
        reference.killed(module, name, count, run, resume=run.exists())
        before, newest = newest, RunDirectory.open(run).steps()[-1]
        assert newest >= before, name
    assert newest >= 20
    reference.resume(run)


@pytest.mark.parametrize(
    ("name", "count", "latest"), [("_point", 7, 10), ("prune", 7, 12)], ids=["before the pointer", "before pruning"]
)
def test_killed_when_the_last_checkpoint_is_written_and_not_all_that_follows(
    short_reference: Reference, tmp_path: Path, name: str, count: int, latest: int
) -> None:
    run = tmp_path / "run"
    short_reference.killed("sheepop.checkpoint.run_directory", f"RunDirectory.{name}", count, run)
    directory = RunDirectory.open(run)
    assert directory.pointer("latest") == latest
    assert directory.steps()[-2:] == [10, 12]
    short_reference.resume(run)


def test_killed_before_the_first_step_a_run_starts_again(reference: Reference, tmp_path: Path) -> None:
    reference.killed("sheepop.jobs.run.open", "resolved", 1, tmp_path / "run")
    reference.resume(tmp_path / "run")


def test_interrupted_again_and_again(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = run / "metrics.jsonl"
    for number, code, step in ((signal.SIGINT, 130, 8), (signal.SIGTERM, 143, 16), (signal.SIGUSR1, 138, 24)):
        process = reference.launcher.start(*reference.options(run, resume=run.exists()))
        while process.poll() is None and not (log.is_file() and f'"step": {step},' in log.read_text()):
            time.sleep(0.005)
        process.send_signal(number)
        done = process.wait()
        assert done.code == code, done.err
        assert "everything is saved" in done.err
        assert "Traceback" not in done.err
    reference.resume(run)


# Ends the process at the nth of all moments that make a change durable: before each flush, before and after each
# rename. (A kill finds the same files before a flush and after it.) With n = 0 it counts them.
AT_THE_DISK = """
import os, signal, sys
chosen, moments = int(sys.argv[1]), 0
def moment():
    global moments
    moments += 1
    if moments == chosen:
        os.kill(os.getpid(), signal.SIGKILL)
def killing(original, is_rename):
    def call(*arguments, **options):
        moment()
        result = original(*arguments, **options)
        if is_rename:
            moment()
        return result
    return call
for name in ("rename", "replace", "fsync"):
    setattr(os, name, killing(getattr(os, name), name != "fsync"))
sys.argv = ["sheepop", *sys.argv[2:]]
from sheepop.cli.main import main
try:
    main()
finally:
    if chosen == 0:
        print(moments)
"""


SLICES = 8  # each with its own time limit


@pytest.fixture(scope="module")
def moments(short_reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many moments at the disk a whole run has."""
    run = tmp_path_factory.mktemp("counted") / "run"
    done = short_reference.launcher.run(0, *short_reference.options(run), program=AT_THE_DISK)
    assert done.code == 0, done.err
    return int(done.out.split()[-1])


def kill_at_the_disk(reference: Reference, run: Path, moment: int) -> None:
    """Kills a run there and resumes it to the end."""
    killed = reference.launcher.run(moment, *reference.options(run), program=AT_THE_DISK)
    assert killed.code == -signal.SIGKILL, killed.err
    reference.resume(run)


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_killed_in_a_rename_or_a_flush(short_reference: Reference, moments: int, tmp_path: Path, share: float) -> None:
    kill_at_the_disk(short_reference, tmp_path / "run", round(share * moments))


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(SLICES))
def test_killed_in_every_rename_and_flush(short_reference: Reference, moments: int, tmp_path: Path, part: int) -> None:
    for moment in range(1 + part, moments + 1, SLICES):
        run = tmp_path / f"run-{moment}"
        kill_at_the_disk(short_reference, run, moment)
        shutil.rmtree(run)


def kill_somewhere(reference: Reference, run: Path, seconds: float) -> bool:
    """Kills a run after so many seconds and resumes it to the end; false when it had ended before."""
    process = reference.launcher.start(*reference.options(run))
    time.sleep(seconds)
    was_killed = process.kill().code == -signal.SIGKILL
    reference.resume(run)
    return was_killed


@pytest.fixture(scope="module")
def lifetime(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that a whole run takes."""
    run = tmp_path_factory.mktemp("timed") / "run"
    started = time.monotonic()
    assert reference.finished(reference.options(run)).code == 0
    return time.monotonic() - started


def test_killed_at_some_instant(reference: Reference, lifetime: float, tmp_path: Path) -> None:
    kill_somewhere(reference, tmp_path / "run", 0.6 * lifetime)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(4))
def test_killed_at_a_hundred_instants(reference: Reference, lifetime: float, tmp_path: Path, part: int) -> None:
    draw, kills = random.Random(part), 0
    for attempt in range(50):
        run = tmp_path / f"run-{attempt}"
        kills += kill_somewhere(reference, run, draw.uniform(0.1, lifetime))
        shutil.rmtree(run)
        if kills == 25:
            return
    raise AssertionError(f"only {kills} of 50 runs were killed before they ended")


def newest_checkpoint(run: Path) -> Path:
    """Not what `latest` names: a newer one may be complete whose pointer had not moved when the process was killed."""
    directory = RunDirectory.open(run)
    return directory.checkpoint(directory.steps()[-1])


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    file.unlink()
    content[len(content) // 2] ^= 16
    if how != "remove":
        file.write_bytes(content if how == "flip" else content[: len(content) // 2])


def test_a_damaged_latest_checkpoint_costs_only_the_work_since_the_one_before(
    reference: Reference, tmp_path: Path
) -> None:
    run, expected = tmp_path / "run", ""
    for name, how, count in (
        ("model.safetensors", "flip", 12),
        ("state/optimizer.safetensors", "truncate", 9),
        ("checksums.json", "remove", 14),
    ):
        said = reference.killed("sheepop.train.step", "StepRunner.gradients", count, run, resume=bool(expected))
        assert expected in said
        damage(file := newest_checkpoint(run) / name, how)
        expected = f"{file} is {'missing' if how == 'remove' else 'damaged'}"
    assert expected in reference.resume(run)


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_any_file_of_the_latest_checkpoint_may_be_damaged(short_reference: Reference, tmp_path: Path, how: str) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    short_reference.killed("sheepop.train.step", "StepRunner.gradients", 11, run)
    shutil.copytree(run, whole)
    newest = newest_checkpoint(run)
    # The card is for people, who may edit it.
    names = sorted(file.relative_to(newest) for file in newest.rglob("*") if file.is_file() and file.name != CARD)
    assert len(names) >= 7
    for name in names:
        damage(newest / name, how)
        assert f"Checkpoint {newest} is skipped" in short_reference.resume(run), name
        shutil.rmtree(run)
        shutil.copytree(whole, run)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"source": f"double {number}", "target": str(2 * number)} for number in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


PAIRS = (
    "model.architecture=encoder_decoder",
    "model.num_layers=1",
    "model.ngrams=null",
    "model.short_convolution=null",
    "training.label_smoothing=0.1",
    "training.sample_prompts=[double 7]",
)


def test_killed_while_it_learns_pairs(reference: Reference, pairs: Path, tmp_path: Path) -> None:
    """Sources, targets and their order come again as they were: all that is remembered of them is the step."""
    unbroken, run = reference.made(pairs, tmp_path / "unbroken", *PAIRS), tmp_path / "run"
    unbroken.killed("torch.autograd", "backward", 2 * 26 + 1, run)
    assert RunDirectory.open(run).steps()[-1] >= 20
    unbroken.resume(run)
