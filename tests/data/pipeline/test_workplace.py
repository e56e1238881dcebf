"""The directory of a build: what is written there of the times of stages, and when it cannot be written."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sheepop.core.errors import StorageError
from sheepop.data.discovery import Entry
from sheepop.data.pipeline.workplace import StageTimes, take_inventory


def test_a_stage_that_goes_on_after_a_kill_has_the_time_of_both_runs(tmp_path: Path) -> None:
    noted, left = tmp_path / "seconds.json", tmp_path / "left"
    left.mkdir()
    with StageTimes(tmp_path).stage("clean"):
        while not noted.is_file():
            time.sleep(0.02)
        shutil.copy(noted, left)  # all that a kill would leave
    killed = StageTimes(left)
    before = killed.seconds["clean"]
    with killed.stage("clean"):
        pass
    with killed.stage("shuffle"):
        pass
    found = StageTimes(left).seconds
    assert found.keys() == {"clean", "shuffle"}
    assert found["clean"] >= before > 0.5
    assert found["shuffle"] < before


@pytest.fixture
def small_files() -> Iterator[None]:
    """As on a full disk, a file of this process cannot grow beyond 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_while_inputs_are_listed_is_named(tmp_path: Path, small_files: None) -> None:
    entries = [Entry("file", f"/in/{number}", f"{number}", 1) for number in range(200)]
    with pytest.raises(StorageError, match=f"Cannot write {tmp_path}"):
        take_inventory(tmp_path, entries, {})
