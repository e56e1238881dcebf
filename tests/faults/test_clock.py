"""A time of day that jumps back and forth while a run is measured, planned and trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..command_line import cold

# Read by way of the C library the time of day is a day ahead and a day behind by turns; monotonic clocks are as ever.
JUMPING = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static time_t jump(void) {
    static unsigned reads;
    return __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED) % 2 ? 86400 : -86400;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}
"""


@pytest.fixture(scope="module")
def jumping_time(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process to which the time of day jumps with every look at it."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("putting another clock before the C library's needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "jumping.c").write_text(JUMPING)
    library = folder / "jumping.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "jumping.c")], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_a_clock_that_jumps_changes_neither_plan_nor_rates(
    text_folder: Path, tiny: tuple[str, ...], jumping_time: dict[str, str], tmp_path: Path
) -> None:
    look = "import time; first, second = time.time(), time.time(); print(second - first)"
    jumped = subprocess.run([sys.executable, "-c", look], env=jumping_time, capture_output=True, text=True, check=True)
    assert abs(float(jumped.stdout)) > 86_400

    budget = ("training.max_steps=200", "training.max_minutes=0.05", "training.log_interval=1")
    run = tmp_path / "run"
    options = ["train", "--data", str(text_folder), "--output", str(run), "--device", "cpu", *tiny, *budget]
    started = time.monotonic()
    done = cold(*options, **jumping_time)
    elapsed = time.monotonic() - started
    assert done.code == 0, done.err

    step_seconds = json.loads((run / "environment.json").read_text())["step_seconds"]
    assert 0 < step_seconds < elapsed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= rows[-1]["step"] <= 200
    seconds = [row["seconds"] for row in rows if row["split"] != "score"]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] <= seconds[-1] < elapsed
    train = [row for row in rows if row["split"] == "train"]
    assert all(row["tokens_per_second"] > 0 and row["mfu"] > 0 for row in train)
    tokens = [0, *(row["tokens"] for row in train)]
    on_steps = [(tokens[i + 1] - tokens[i]) / row["tokens_per_second"] for i, row in enumerate(train)]
    assert sum(on_steps) <= seconds[-1]
