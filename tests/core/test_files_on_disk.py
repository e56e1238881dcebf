"""In which order files, directories and their names reach the disk, and what is there when that ends in its middle."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import StorageError
from sheepop.core.files import (
    TEMPORARY_MARK,
    atomic_directory,
    atomic_file,
    damaged_files,
    make_directory,
    remove_partial,
    write_atomic,
)


def directory_of(target: Path, text: str) -> None:
    with atomic_directory(target, replace=True) as place:
        (place / "weights").write_text(text)
        (place / "state").mkdir()
        (place / "state" / "optimizer").write_text(f"{text} state")


def test_everything_is_flushed_before_the_rename(tmp_path: Path, disk_order: list[str]) -> None:
    directory_of(tmp_path / "model", "one")
    (rename,) = (event for event in disk_order if event.endswith(" -> model"))
    place = rename.partition(" ")[0]
    before, after = disk_order[: disk_order.index(rename)], disk_order[disk_order.index(rename) + 1 :]
    assert {"weights", "optimizer", "state", "checksums.json", place} <= set(before)
    assert after == [tmp_path.name]


def test_a_file_is_flushed_before_its_rename_and_the_rename_after_it(tmp_path: Path, disk_order: list[str]) -> None:
    write_atomic(tmp_path / "small", "one")
    with atomic_file(tmp_path / "large") as place:
        place.write_bytes(b"two")
    expected = []
    for name in ("small", "large"):
        (rename,) = (event for event in disk_order if event.endswith(f"-> {name}"))
        expected += [rename.partition(" ")[0], rename, tmp_path.name]
    assert disk_order == expected


def test_what_is_flushed_is_the_whole_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, sizes = os.fsync, []

    def measured(descriptor: int) -> None:
        found = os.fstat(descriptor)
        sizes.extend([found.st_size] if stat.S_ISREG(found.st_mode) else [])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", measured)
    write_atomic(tmp_path / "small", "three")
    with atomic_file(tmp_path / "large") as place:
        place.write_bytes(b"seventh")
    assert sizes == [5, 7]


def test_a_new_directory_is_on_the_disk_before_what_is_put_into_it(tmp_path: Path, disk_order: list[str]) -> None:
    make_directory(tmp_path / "runs" / "first")
    assert disk_order == [tmp_path.name, "runs"]
    make_directory(tmp_path / "runs" / "first")
    assert disk_order == [tmp_path.name, "runs"]
    directory_of(tmp_path / "a" / "b" / "model", "one")
    with atomic_file(tmp_path / "c" / "file") as place:
        place.write_bytes(b"two")
    renames = [number for number, event in enumerate(disk_order) if event.endswith((" -> model", " -> file"))]
    assert disk_order[2:4] == [tmp_path.name, "a"]
    assert disk_order[renames[0] + 1 : renames[0] + 3] == ["b", tmp_path.name]
    assert disk_order[renames[1] + 1 :] == ["c"]


def test_the_old_directory_goes_when_the_new_one_is_on_the_disk(
    tmp_path: Path, disk_order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(tmp_path / "model", "old")
    remove = shutil.rmtree

    def removed(path: Path, **options: Any) -> None:
        disk_order.append(f"removed {(path / 'weights').read_text()}")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    directory_of(tmp_path / "model", "new")
    assert disk_order[-3:][0].endswith(" -> model")
    assert disk_order[-2:] == [tmp_path.name, "removed old"]


def test_a_rename_that_is_refused_gives_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory_of(tmp_path / "model", "old")
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if TEMPORARY_MARK in Path(source).name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(StorageError, match="the disk is full"):
        directory_of(tmp_path / "model", "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert damaged_files(tmp_path / "model") == []


def test_a_directory_killed_after_the_two_renames_is_the_new_one(tmp_path: Path) -> None:
    directory_of(tmp_path / "model", "new")
    directory_of(tmp_path / ".model.replaced-0123456789ab", "old")
    remove_partial(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "new"


def test_a_link_to_nowhere_is_a_target_that_holds_something(tmp_path: Path) -> None:
    for name in ("model", "file"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="already exists"), atomic_file(tmp_path / "file"):
        pytest.fail("the work began")
    with pytest.raises(StorageError, match="already exists"), atomic_directory(tmp_path / "model"):
        pytest.fail("the work began")
    directory_of(tmp_path / "model", "new")
    assert not (tmp_path / "model").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_replacing_a_link_leaves_what_it_names(tmp_path: Path) -> None:
    directory_of(tmp_path / "kept", "mine")
    (tmp_path / "model").symlink_to(tmp_path / "kept")
    directory_of(tmp_path / "model", "new")
    assert (tmp_path / "kept" / "weights").read_text() == "mine"
    assert damaged_files(tmp_path / "kept") == []
    assert (tmp_path / "model" / "weights").read_text() == "new"
