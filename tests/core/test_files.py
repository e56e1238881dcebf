from __future__ import annotations

import errno
import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sheepop.core.errors import CheckpointError, DataError, StorageError
from sheepop.core.files import (
    atomic_directory,
    atomic_file,
    damaged_files,
    read_json,
    remove_partial,
    remove_tree,
    require_writable,
    sha256_file,
    storage_errors,
    write_atomic,
    write_json,
)


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


# Single files


def test_a_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path):
    target = tmp_path / "a.txt"
    write_atomic(target, "long old content")
    write_atomic(target, "né")
    assert target.read_bytes() == b"n\xc3\xa9"
    write_atomic(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    target = tmp_path / "a.txt"
    write_atomic(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(target, "\ud800")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_directory_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match=r"Cannot write .*/a: a directory with that name is in the way"):
        write_atomic(tmp_path / "a", "text")
    assert names(tmp_path) == ["a"]


def test_a_file_on_the_way_is_named(tmp_path: Path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(StorageError, match="part of the path is a file"):
        write_atomic(tmp_path / "a" / "b", "text")


def test_a_place_that_takes_files_is_made_and_left_empty_and_another_is_named(tmp_path: Path):
    require_writable(tmp_path / "a" / "b")
    require_writable(tmp_path / "a" / "b")
    assert names(tmp_path) == ["a", "a/b"]
    (tmp_path / "file").write_text("old")
    with pytest.raises(StorageError, match=r"Cannot write .*/file: part of the path is a file"):
        require_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"


def test_json_is_written_readably_and_never_with_nan(tmp_path: Path):
    write_json(tmp_path / "a.json", {"name": "é", "sizes": [1, 2.5]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == (
        '{\n  "name": "é",\n  "sizes": [\n    1,\n    2.5\n  ]\n}\n'
    )
    assert read_json(tmp_path / "a.json") == {"name": "é", "sizes": [1, 2.5]}
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "a.json", float("nan"))
    assert read_json(tmp_path / "a.json")["name"] == "é"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 200_000])
def test_damaged_json_is_an_error_of_the_callers_kind(tmp_path: Path, content: bytes):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json is damaged: it is not valid JSON"):
        read_json(tmp_path / "a.json", DataError)
    with pytest.raises(CheckpointError, match=r"b\.json is missing"):
        read_json(tmp_path / "b.json")


# Directories


def fill(directory: Path, text: str) -> None:
    (directory / "weights").write_text(text)
    (directory / "state").mkdir()
    (directory / "state" / "optimizer").write_text(f"{text} state")


def test_a_large_file_appears_whole(tmp_path: Path):
    target = tmp_path / "deep" / "file"
    with atomic_file(target) as place:
        place.write_bytes(b"one")
        assert not target.exists()
    with pytest.raises(StorageError, match="already exists"), atomic_file(target):
        pytest.fail("the work began")
    with pytest.raises(ZeroDivisionError), atomic_file(target, replace=True) as place:
        place.write_bytes(b"two")
        1 / 0  # noqa: B018
    assert target.read_bytes() == b"one"
    with atomic_file(target, replace=True) as place:
        place.write_bytes(b"three")
    assert target.read_bytes() == b"three"
    assert names(tmp_path) == ["deep", "deep/file"]


def test_a_large_file_does_not_take_the_place_of_a_directory(tmp_path: Path):
    (tmp_path / "place").mkdir()
    for replace in (False, True):
        with pytest.raises(StorageError), atomic_file(tmp_path / "place", replace=replace):
            pytest.fail("the work began")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file/below"), atomic_file(tmp_path / "file" / "below"):
        pytest.fail("the work began")


def test_a_directory_appears_whole_with_the_checksums_of_its_files(tmp_path: Path):
    target = tmp_path / "deep" / "model"
    with atomic_directory(target) as place:
        fill(place, "one")
        assert not target.exists()
    assert names(target) == ["checksums.json", "state", "state/optimizer", "weights"]
    assert json.loads((target / "checksums.json").read_text()) == {
        "state/optimizer": hashlib.sha256(b"one state").hexdigest(),
        "weights": hashlib.sha256(b"one").hexdigest(),
    }
    assert sha256_file(target / "weights") == hashlib.sha256(b"one").hexdigest()
    assert damaged_files(target) == []
    assert names(tmp_path / "deep") == [f"model{rest}" for rest in ("", *(f"/{name}" for name in names(target)))]


def test_a_directory_can_be_read_by_whoever_may_read_other_new_files(tmp_path: Path):
    (tmp_path / "usual").write_text("")
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "state").mkdir()
        for file in (directory / "weights", directory / "state" / "moments"):
            file.touch(mode=0o600)
        (directory / "program").touch(mode=0o700)
    usual = (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "model" / "weights").stat().st_mode == usual
    assert (tmp_path / "model" / "state" / "moments").stat().st_mode == usual
    assert (tmp_path / "model" / "program").stat().st_mode == usual | 0o100


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_whose_making_fails_is_absent(tmp_path: Path, replace: bool):
    def make() -> None:
        with atomic_directory(tmp_path / "model", replace=replace) as place:
            fill(place, "one")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make()
    assert names(tmp_path) == []


def test_replacing_keeps_the_old_directory_when_the_new_one_fails(tmp_path: Path):
    target = tmp_path / "model"
    with atomic_directory(target) as place:
        fill(place, "old")
    with pytest.raises(ZeroDivisionError), atomic_directory(target, replace=True) as place:
        fill(place, "new")
        1 / 0  # noqa: B018
    assert (target / "weights").read_text() == "old"
    with atomic_directory(target, replace=True) as place:
        (place / "only").write_text("new")
    assert names(tmp_path) == ["model", "model/checksums.json", "model/only"]


def test_a_target_that_holds_something_is_refused_before_any_work(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with atomic_directory(tmp_path / "model") as place:  # an empty directory holds nothing to lose
        fill(place, "one")
    with pytest.raises(StorageError, match="already exists"), atomic_directory(tmp_path / "model"):
        pytest.fail("the work began")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="already exists"), atomic_directory(tmp_path / "file"):
        pytest.fail("the work began")


def test_an_error_about_an_input_is_not_taken_for_one_about_the_target(tmp_path: Path):
    denied = PermissionError(errno.EACCES, "Permission denied", "/elsewhere/input.txt")
    with pytest.raises(PermissionError), atomic_directory(tmp_path / "model"):
        raise denied
    with pytest.raises(StorageError, match="permission is denied"), storage_errors(tmp_path / "model"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "model"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no file system that takes no directories")
def test_a_place_where_no_directory_can_be_is_refused():
    with pytest.raises(StorageError, match=r"^Cannot write /proc/a/b: no directory can be there\."):
        require_writable("/proc/a/b")


def test_a_full_disk_reported_as_text_by_a_library_is_recognised(tmp_path: Path):
    with (
        pytest.raises(StorageError, match=r"Cannot write .*model: the disk is full"),
        storage_errors(tmp_path / "model"),
    ):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_a_refused_place_reported_as_text_by_a_library_is_recognised_where_it_is_the_target(tmp_path: Path):
    words = 'I/O error: Read-only file system (os error 30) at path "{}/.model.partial-1/state/weights"'
    with (
        pytest.raises(StorageError, match=r"Cannot write .*model: the file system is read-only"),
        storage_errors(tmp_path / "model"),
    ):
        raise RuntimeError(words.format(tmp_path))
    with pytest.raises(RuntimeError, match="elsewhere"), storage_errors(tmp_path / "model"):
        raise RuntimeError(words.format("/elsewhere"))


# Damage


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    with atomic_directory(tmp_path / "model") as place:
        fill(place, "one")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["weights", "state/optimizer"])
def test_a_flipped_bit_names_its_file(whole: Path, name: str):
    content = bytearray((whole / name).read_bytes())
    content[1] ^= 1
    (whole / name).write_bytes(content)
    assert damaged_files(whole) == [f"{whole / name} is damaged: its checksum differs from the recorded one"]


def test_truncated_and_missing_files_are_each_named(whole: Path):
    (whole / "weights").write_bytes(b"on")
    (whole / "state" / "optimizer").unlink()
    assert damaged_files(whole) == [
        f"{whole / 'state' / 'optimizer'} is missing",
        f"{whole / 'weights'} is damaged: its checksum differs from the recorded one",
    ]


@pytest.mark.parametrize("record", [b"{", b"[]", b"\xff", b"[" * 200_000])
def test_a_damaged_record_is_named(whole: Path, record: bytes):
    (whole / "checksums.json").write_bytes(record)
    assert damaged_files(whole) == [f"{whole / 'checksums.json'} is damaged: it is not a table of checksums"]


def test_an_unfinished_directory_is_not_whole(whole: Path):
    (whole / "checksums.json").unlink()
    assert damaged_files(whole) == [f"{whole / 'checksums.json'} is missing: the directory was never finished"]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "a\0b"])
def test_a_record_cannot_point_outside_its_directory(whole: Path, name: str):
    (whole / "checksums.json").write_text(json.dumps({name: "0" * 64}))
    assert damaged_files(whole) == [
        f"{whole / 'checksums.json'} is damaged: {name!r} is not a file below the directory"
    ]


# What a killed writer leaves


def test_leftovers_are_removed_and_other_files_stay(tmp_path: Path):
    (tmp_path / ".model.partial-0123456789ab").mkdir()
    (tmp_path / ".model.partial-0123456789ab" / "weights").write_text("half")
    (tmp_path / ".a.json.partial-ba9876543210").write_text("{")
    kept = ["notes.partial-draft", ".hidden", "model"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    remove_partial(tmp_path)
    assert names(tmp_path) == sorted(kept)
    remove_partial(tmp_path / "absent")


def test_a_directory_killed_between_the_two_renames_comes_back(tmp_path: Path):
    program = f"""
import os
from pathlib import Path
from sheepop.core import files
with files.atomic_directory({str(tmp_path / "model")!r}) as place:
    (place / "weights").write_text("old")
rename = Path.rename
def killed_at_second(self, target):
    if files.TEMPORARY_MARK in self.name:
        os._exit(9)
    return rename(self, target)
Path.rename = killed_at_second
with files.atomic_directory({str(tmp_path / "model")!r}, replace=True) as place:
    (place / "weights").write_text("new")
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert not (tmp_path / "model").exists()
    remove_partial(tmp_path)
    assert names(tmp_path) == ["model", "model/checksums.json", "model/weights"]
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert damaged_files(tmp_path / "model") == []


def test_removing_follows_no_link(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "never was")
    assert names(tmp_path) == ["kept", "kept/file"]


# No space


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB; skipped where mounting one is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        pytest.skip(f"no program to mount a file system with: {error}")
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not allowed: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leaves_the_old_files_and_no_rest(full_disk: Path):
    write_atomic(full_disk / "a", "old")
    with atomic_directory(full_disk / "model") as place:
        fill(place, "old")
    before = names(full_disk)
    with pytest.raises(StorageError, match=r"Cannot write .*/a: the disk is full"):
        write_atomic(full_disk / "a", b"x" * 2**21)
    with (
        pytest.raises(StorageError, match=r"Cannot write .*/model: the disk is full"),
        atomic_directory(full_disk / "model", replace=True) as place,
    ):
        (place / "weights").write_bytes(b"x" * 2**21)
    assert names(full_disk) == before
    assert (full_disk / "a").read_text() == "old"
    assert damaged_files(full_disk / "model") == []


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


def test_a_file_beyond_the_limit_of_the_process_is_an_error_that_names_it(tmp_path: Path):
    write_atomic(tmp_path / "a", "old")
    program = """
import signal, sys
from pathlib import Path
from sheepop.core.errors import StorageError
from sheepop.core.files import write_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    write_atomic(Path(sys.argv[1]), b"x" * 2**20)
except StorageError as error:
    sys.stdout.write(str(error))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=_limit_file_size)
    assert done.stdout.startswith(f"Cannot write {tmp_path / 'a'}: the file would be larger than")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_directory_that_is_removed_while_it_is_written_is_named(tmp_path: Path) -> None:
    refused = pytest.raises(StorageError, match=r"run/checkpoint: its directory was removed or moved")
    with refused, atomic_directory(tmp_path / "run" / "checkpoint") as directory:
        remove_tree(tmp_path / "run")
        (directory / "weights").write_text("1")
