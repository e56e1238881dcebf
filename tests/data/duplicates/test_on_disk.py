from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import StorageError
from sheepop.data.duplicates.on_disk import ExternalSort, array_on_disk, sorted_rows

NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1), st.just(2**64 - 1))


@given(
    st.integers(1, 3).flatmap(lambda columns: st.lists(st.tuples(*[NUMBERS] * columns), min_size=1, max_size=400)),
    st.booleans(),
    st.integers(1, 30),
)
def test_rows_come_in_order_whatever_memory_there_is(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]], unique: bool, at_once: int
) -> None:
    directory = tmp_path_factory.mktemp("sort") / "runs"
    expected = sorted(set(rows)) if unique else sorted(rows)
    with ExternalSort(directory, len(rows[0]), memory_bytes=1, unique=unique) as sort:
        for start in range(0, len(rows), at_once):
            sort.add(np.array(rows[start : start + at_once], np.uint64))
        for _ in range(2):
            assert [tuple(row) for block in sort.blocks() for row in block.tolist()] == expected
        assert directory.exists() == (len(rows) >= 16)
    assert not directory.exists()


def test_many_runs_are_merged_in_stages(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 5000, (16 * 200, 2), dtype=np.uint64)
    with ExternalSort(tmp_path / "runs", 2, memory_bytes=1) as sort:
        sort.add(values)
        assert len(list((tmp_path / "runs").iterdir())) == 200
        found = np.concatenate(list(sort.blocks()))
        assert len(list((tmp_path / "runs").iterdir())) <= 64
    assert np.array_equal(found, values[np.lexsort((values[:, 1], values[:, 0]))])


def test_rows_that_come_again_and_again_do_not_fill_the_disk(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 10, (16 * 1000, 2), dtype=np.uint64)
    with ExternalSort(tmp_path / "runs", 2, memory_bytes=1, unique=True) as sort:
        sort.add(values)
        on_disk = sum(path.stat().st_size for path in (tmp_path / "runs").iterdir())
        assert on_disk < 65 * 100 * 16 < values.nbytes
        assert np.array_equal(np.concatenate(list(sort.blocks())), np.unique(values, axis=0))


def test_nothing_sorts_to_nothing(tmp_path: Path) -> None:
    with ExternalSort(tmp_path / "runs", 2, memory_bytes=1) as sort:
        assert sum(map(len, sort.blocks())) == 0


def test_blocks_are_small_even_when_all_fits_in_memory(tmp_path: Path) -> None:
    with ExternalSort(tmp_path / "runs", 1, memory_bytes=2**24) as sort:
        sort.add(np.arange(200_000, dtype=np.uint64)[::-1, None])
        assert [len(block) for block in sort.blocks()] == [65536, 65536, 65536, 3392]


def test_rows_that_are_tied_are_ordered_by_their_other_columns() -> None:
    values = np.random.default_rng(2).integers(0, 4, (1000, 4), dtype=np.uint64)
    assert sorted_rows(values).tolist() == sorted(values.tolist())


def test_an_array_on_disk_is_zero_where_nothing_was_put(tmp_path: Path) -> None:
    array = array_on_disk(tmp_path / "new" / "numbers", 5)
    array[np.array([3, 1])] = 7, 2**64 - 1
    assert array.tolist() == [0, 2**64 - 1, 0, 7, 0]
    assert np.fromfile(tmp_path / "new" / "numbers", "<u8").tolist() == array.tolist()
    assert array_on_disk(tmp_path / "none", 0, np.bool_).tolist() == []


def test_a_disk_without_room_for_an_array_is_said_before_it_is_used(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"numbers.* would be larger than"):
            array_on_disk(tmp_path / "numbers", 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Cannot write"):
        array_on_disk(tmp_path / "file" / "numbers", 3)
    sort = ExternalSort(tmp_path / "file" / "runs", 1, memory_bytes=1)
    with pytest.raises(StorageError, match="Cannot write"):
        sort.add(np.zeros((40, 1), np.uint64))
