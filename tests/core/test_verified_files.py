"""A large file is read once for its checksum, and again after every change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from sheepop.core import verified_files
from sheepop.core.measurements import recall
from sheepop.core.verified_files import remembered_sha256


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large and has not changed for a while."""
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(tmp_path / "measurements.json"))
    monkeypatch.setattr(verified_files, "_LARGE", 1000)
    monkeypatch.setattr(verified_files, "_TICK", 0.02)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(250)) * 8)
    time.sleep(0.03)
    return path


def remembered(path: Path) -> list[object] | None:
    return recall(f"sha256 of {path}", list[object])


def test_it_is_remembered_until_the_file_changes(large: Path, tmp_path: Path) -> None:
    expected = hashlib.sha256(large.read_bytes()).hexdigest()
    assert remembered_sha256(large) == expected
    known = remembered(large)
    assert known is not None and known[-1] == expected
    assert remembered_sha256(large) == expected
    # The same size and the same time of modification: the time of the change of its entry tells.
    before = large.stat()
    changed = bytes(reversed(large.read_bytes()))
    large.write_bytes(changed)
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered_sha256(large) == hashlib.sha256(changed).hexdigest() != expected
    # Another file under the same name.
    other = tmp_path / "other"
    other.write_bytes(b"x" * len(changed))
    other.replace(large)
    assert remembered_sha256(large) == hashlib.sha256(b"x" * len(changed)).hexdigest()


def test_a_small_file_and_one_that_has_just_changed_are_read_each_time(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_files, "_TICK", 600.0)  # longer than a busy machine may pause
    small = tmp_path / "small"
    small.write_bytes(b"abc")
    assert remembered_sha256(small) == hashlib.sha256(b"abc").hexdigest()
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"x" * 2000)
    assert remembered_sha256(fresh) == hashlib.sha256(b"x" * 2000).hexdigest()
    assert remembered(small) is remembered(fresh) is None


def test_what_is_remembered_is_used(large: Path) -> None:
    remembered_sha256(large)
    path = large.parent / "measurements.json"
    path.write_text(path.read_text().replace(hashlib.sha256(large.read_bytes()).hexdigest(), "0" * 64))
    assert remembered_sha256(large) == "0" * 64
