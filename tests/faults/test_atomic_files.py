"""Long campaigns against core's files: killed at any moment, and damaged in any byte."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sheepop.core.files import atomic_directory, damaged_files, remove_partial

pytestmark = pytest.mark.campaign

WRITER = """
import sys
from pathlib import Path
from sheepop.core.files import atomic_directory, remove_partial, write_atomic
place, first = Path(sys.argv[1]), int(sys.argv[2])
remove_partial(place)
for number in range(first, first + 1_000_000):
    write_atomic(place / "file", f"{number}\\n" * 5_000)
    with atomic_directory(place / "model", replace=True) as directory:
        for name in ("weights", "state"):
            (directory / name).write_text(f"{number}\\n" * 5_000)
    print(number, flush=True)
"""


def the_number_in(path: Path) -> int:
    """The one number a whole file repeats."""
    numbers = path.read_text().splitlines()
    assert len(numbers) == 5_000
    assert len(set(numbers)) == 1
    return int(numbers[0])


def test_whatever_the_moment_of_a_kill_files_and_directories_are_whole(tmp_path: Path):
    moments = random.Random(1)
    written = 0
    for _ in range(150):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(written + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            confirmed = int(writer.stdout.readline())
            time.sleep(moments.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            confirmed = max([confirmed, *map(int, writer.stdout.read().split("\n")[:-1])])
        remove_partial(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]
        assert damaged_files(tmp_path / "model") == []
        found = {the_number_in(tmp_path / "model" / name) for name in ("weights", "state")}
        assert len(found) == 1
        assert confirmed <= found.pop() <= the_number_in(tmp_path / "file") <= confirmed + 1
        written = the_number_in(tmp_path / "file")


def test_every_flipped_bit_is_noticed(tmp_path: Path):
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "weights").write_bytes(random.Random(0).randbytes(200))
    weights, record = tmp_path / "model" / "weights", tmp_path / "model" / "checksums.json"
    for file in (weights, record):
        whole = file.read_bytes()
        for place in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            problems = damaged_files(tmp_path / "model")
            # A space of the record's layout may become another without changing what it says.
            assert problems or (file == record and whole[place // 8 : place // 8 + 1].isspace())
        file.write_bytes(whole)
    assert damaged_files(tmp_path / "model") == []
