"""The runs of a family: their settings, their directories, and how they train, alone or side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sheepop.core.config import merge
from sheepop.core.errors import DataError, SheepOpError, TrainingError
from sheepop.core.files import read_json, write_json
from sheepop.core.machine import usable_cores
from sheepop.core.program import typed
from sheepop.jobs.run.listing import FoundRun, read_run
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.scale.family import Family, Member

RUNS, FAILED = "runs", "failed.json"
_SAMPLED = 16_384  # held-out tokens of the validations during training
_PROGRAM = """
import sys
from pathlib import Path
from sheepop.core.bounded_child import end_with
from sheepop.jobs.family_runs import train_member
end_with(int(sys.argv[3]), sys.stdin.fileno())
train_member(Path(sys.argv[1]), sys.argv[2])
"""


def settings_of(family: Family, member: Member, place: Path) -> dict[str, Any]:
    """The whole settings of a member: nothing is measured, so it trains alike on any machine."""
    own = {
        "data": {"paths": [family.corpus]},
        "output_dir": str(place),
        "model": asdict(member.shape),
        "training": {
            "learning_rate": family.learning_rate(member.shape),
            "max_steps": member.steps,
            "precision": "fp32",
            "compile": False,
            "eval_interval": member.steps,
            "sample_interval": member.steps,
            "checkpoint_interval": max(1, member.steps // 2),
            "keep_checkpoints": 1,
            "keep_milestones": False,
            "eval_tokens": _SAMPLED,
        },
    }
    return merge(own, family.settings)


def train_member(directory: Path, name: str) -> None:
    """Trains or resumes one run of a family; writes down why if it diverges."""
    family = Family.read(directory)
    member = next(each for each in family.members if each.name == name)
    given = settings_of(family, member, place_of(directory, member))
    try:
        train(RunRequest(given, resume=True, uses_recipe=False, resume_with=typed("scale", "--resume", directory)))
    except TrainingError as error:
        write_json(place_of(directory, member) / FAILED, {"reason": str(error)})


def side_by_side(directory: Path, members: Sequence[Member], count: int) -> Iterator[None]:
    """Trains runs in `count` processes, which share the cores; yields after each.

    They end with this process, even if it is killed.
    """
    threads = max(1, int(usable_cores()) // count)
    running: set[subprocess.Popen[str]] = set()

    def run(member: Member) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(directory), member.name, str(os.getpid())],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.add(process)
        with process:
            assert process.stderr is not None
            said = process.stderr.read()
            process.wait()  # before its input closes, which would end it
        running.discard(process)
        if process.returncode != 0 and not ending:
            last = (said.strip().splitlines() or ["no message"])[-1]
            raise SheepOpError(f"The run {member.name} of the family failed: {last}")

    ending = False
    pool = ThreadPoolExecutor(count)
    try:
        for done in [pool.submit(run, member) for member in members]:
            done.result()
            yield
    finally:
        ending = True
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        pool.shutdown()


def is_done(directory: Path, member: Member) -> bool:
    """Whether a run has its score, or has diverged."""
    place = place_of(directory, member)
    if failure_of(place) is not None:
        return True
    try:
        return bool(score_of(read_run(place)))
    except (SheepOpError, OSError):
        return False


def failure_of(place: Path) -> str | None:
    """Why a run of a family ended with an error; None if it did not. Raises `DataError` for a damaged file."""
    file = place / FAILED
    if not file.is_file():
        return None
    found = read_json(file, DataError)
    if not isinstance(found, dict) or not isinstance(found.get("reason"), str):
        raise DataError(f"{file} is damaged. Remove it to train this run again.")
    return str(found["reason"])


def score_of(found: FoundRun) -> Mapping[str, Any]:
    """The last score of a run; empty if it has none."""
    rows = [row for row in found.metrics if row.get("split") == "score"]
    return rows[-1] if rows else {}


def place_of(directory: Path, member: Member) -> Path:
    """The directory of a run."""
    return directory / RUNS / member.name
