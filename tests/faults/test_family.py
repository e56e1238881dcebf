"""A family of runs whose processes are killed goes on to the law of one that nobody disturbed, bit for bit."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from ..command_line import Launcher, Started
from .conftest import Reference

# Two curves of equal operations in place of three.
PROGRAM = "from sheepop.scale import family; family._LEVELS = 2; from sheepop.__main__ import main; main()"
SETTINGS = (
    "training.global_batch_size=4", "training.sample_tokens=4", "training.sinks=[]", "model.max_seq_len=16",
    "model.ngrams=null", "tokenizer.algorithm=char", "data.validation_fraction=0.1",
)  # fmt: skip


def begin(launcher: Launcher, text: Path, place: Path, at_once: int) -> Started:
    """Begins a family of six runs, the shortest of which has 30 steps."""
    budgets = ["--budget", "1e10flops", "--spend", "8e9flops", "--sizes", "32x1,32x2,64x1", "--at-once", str(at_once)]
    options = ["--data", str(text), "--output", str(place), *budgets, "--quiet", "device=cpu", *SETTINGS]
    return launcher.start("scale", *options, program=PROGRAM)


def started_by(pid: int) -> list[int]:
    """The processes that the threads of a process have started."""
    return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]


def is_at_work(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked what became of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_score(run: Path) -> bool:
    log = run / "metrics.jsonl"
    return log.is_file() and '"split": "score"' in log.read_text()


def test_a_family_whose_processes_are_killed_goes_on_to_the_same_law(
    launcher: Launcher, text_folder: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = begin(launcher, text_folder, whole, at_once=1).wait()
    assert done.code == 0, done.err
    process = begin(launcher, text_folder, killed, at_once=2)
    while not any(killed.glob("runs/*/checkpoints/latest")):
        assert process.poll() is None, process.poll()
        time.sleep(0.005)
    refused = launcher.run("scale", "--resume", killed)
    trainers = started_by(process.pid)
    assert process.kill().code == -signal.SIGKILL
    assert len(trainers) == 2
    until = time.monotonic() + 60
    while any(map(is_at_work, trainers)):
        assert time.monotonic() < until, "the runs of a killed family go on"
        time.sleep(0.005)
    assert refused.code == 2 and "Another process works on the family" in refused.err
    begun = list((killed / "runs").iterdir())
    assert begun and not all(map(has_score, begun))
    done = launcher.run("scale", "--resume", killed, "--at-once", "1", "--quiet")
    assert done.code == 0, done.err
    assert (killed / "law.json").read_bytes() == (whole / "law.json").read_bytes()
    for run in (whole / "runs").iterdir():
        Reference(text_folder, run, launcher).require_equal(killed / "runs" / run.name)
