"""The directory of a build: its inventory and parts, the times of its stages, and a disk that fills."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import StorageError
from sheepop.data.discovery import Entry
from sheepop.data.extract.interface import Span
from sheepop.data.pipeline.workplace import Inventory, StageTimes, take_inventory


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


MB = 2**20


def files(*sizes: int, suffix: str = "") -> list[Entry]:
    return [Entry("file", f"/in/{n}", f"{n}{suffix}", size, modified_ns=n) for n, size in enumerate(sizes)]


def write_inventory(directory: Path, entries: list[Entry], settings: object) -> Inventory:
    inventory, _ = take_inventory(directory, entries, settings)
    return inventory


def sizes_of_parts(directory: Path, entries: list[Entry]) -> list[list[int]]:
    inventory = write_inventory(directory, entries, {})
    return [[entry.size for entry in inventory.entries(number)] for number in range(len(inventory.parts))]


def test_parts_of_little_text_hold_consecutive_files_of_about_two_megabytes(tmp_path: Path) -> None:
    sizes = [MB, MB // 2, MB, 3 * MB, 100]
    assert sizes_of_parts(tmp_path, files(*sizes)) == [[MB, MB // 2], [MB], [3 * MB], [100]]


def test_parts_are_smaller_where_files_take_longer(tmp_path: Path) -> None:
    # A process reads 2.5 MB of text a second, 1 MB of PDF and 0.05 MB of pictures, and a part is 0.8 seconds.
    assert {len(part) for part in sizes_of_parts(tmp_path, files(*[99_000] * 40))} == {20}
    assert {len(part) for part in sizes_of_parts(tmp_path, files(*[99_000] * 40, suffix=".pdf"))} == {8}
    assert {len(part) for part in sizes_of_parts(tmp_path, files(*[99_000] * 40, suffix=".PNG"))} == {1}


def test_parts_grow_with_the_input_to_256_of_them_and_no_further_than_100_seconds(tmp_path: Path) -> None:
    assert len(sizes_of_parts(tmp_path, files(*[MB] * 2560))) == 256
    parts = sizes_of_parts(tmp_path, files(*[2**30] * 3, *[120_000_000] * 2000))
    assert parts[:3] == [[2**30]] * 3
    assert {len(part) for part in parts[3:]} == {2}


def test_a_large_file_is_the_parts_that_it_is_cut_into(tmp_path: Path) -> None:
    def cut(entry: Entry, part_bytes: int) -> list[Span]:
        assert entry.source == "1" and part_bytes == pytest.approx(2_000_000, abs=1)
        return [Span(0, 0, 3 * MB, 0, 3 * MB), Span(1, 3 * MB, 5 * MB, 70, 2 * MB)]

    entries = files(100, 5 * MB, 100)
    inventory, _ = take_inventory(tmp_path, entries, {}, cut)
    parts = [list(inventory.entries(number)) for number in range(len(inventory.parts))]
    assert [[(entry.source, entry.size) for entry in part] for part in parts] == [
        [("0", 100)],
        [("1", 3 * MB)],
        [("1", 2 * MB)],
        [("2", 100)],
    ]
    assert [part[0].span and part[0].span.before for part in parts] == [None, 0, 70, None]
    assert inventory.fingerprint != write_inventory(tmp_path, entries, {}).fingerprint


def test_a_part_has_a_bounded_number_of_files(tmp_path: Path) -> None:
    assert [len(part) for part in sizes_of_parts(tmp_path, files(*[1] * 4500))] == [2000, 2000, 500]


def test_the_rows_of_a_query_are_a_part_of_their_own(tmp_path: Path) -> None:
    entries = [*files(10, 10), Entry("query", "", "db: SELECT 1", 0)]
    inventory = write_inventory(tmp_path, entries, {})
    assert [part.entries for part in inventory.parts] == [2, 1]


@given(sizes=st.lists(st.integers(0, 3 * MB), max_size=30), name=st.text())
def test_every_entry_comes_back_once_in_order(
    sizes: list[int], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("inventory")
    entries = [
        *files(*sizes),
        Entry("git", "/r\udcff", name.encode("utf-8", "replace").decode(), 5, 0, "abc", (("k", "v"),)),
    ]
    inventory = write_inventory(directory, entries, {"seed": 1})
    assert [entry for number in range(len(inventory.parts)) for entry in inventory.entries(number)] == entries
    assert sum(part.size for part in inventory.parts) == sum(entry.size for entry in entries) == inventory.num_bytes


def test_the_fingerprint_knows_settings_names_sizes_and_ages(tmp_path: Path) -> None:
    base = files(10, 20)
    same = write_inventory(tmp_path, base, {"seed": 1}).fingerprint
    assert write_inventory(tmp_path, files(10, 20), {"seed": 1}).fingerprint == same
    others = [
        (base, {"seed": 2}),
        (files(10, 21), {"seed": 1}),
        (base[:1], {"seed": 1}),
        ([base[0], Entry("file", "/in/1", "renamed", 20, 1)], {"seed": 1}),
        ([base[0], Entry("file", "/in/1", "1", 20, 2)], {"seed": 1}),
    ]
    fingerprints = {write_inventory(tmp_path, entries, settings).fingerprint for entries, settings in others}
    assert len(fingerprints | {same}) == 6


@pytest.mark.parametrize("damage", ["", "{", '{"parts": []}', "[]"])
def test_an_inventory_that_is_here_is_known_again_and_a_damaged_one_is_made_anew(tmp_path: Path, damage: str) -> None:
    entries = files(1)
    assert not take_inventory(tmp_path, entries, {})[1]
    part = tmp_path / "pass-0" / "00000"
    part.mkdir(parents=True)
    assert take_inventory(tmp_path, entries, {})[1] and part.is_dir()
    (tmp_path / "plan.json").write_text(damage)
    assert not take_inventory(tmp_path, entries, {})[1] and not part.exists()
