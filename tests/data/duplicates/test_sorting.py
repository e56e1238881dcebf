from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError, StorageError
from sheepop.data.duplicates.number_file import NumberFile
from sheepop.data.duplicates.sorting import Cursor, ExternalSort, sorted_rows

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


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 60), max_size=6))
def test_a_cursor_reads_as_far_as_asked(numbers: list[int], bounds: list[int]) -> None:
    ordered = np.array(sorted(numbers), np.uint64)[:, None]
    cursor = Cursor(iter(np.array_split(ordered, 5)), 1)
    passed = 0
    for bound in [*sorted(bounds), 100]:
        taken = [int(value) for rows in cursor.take_below(bound) for value in rows[:, 0]]
        assert taken == [n for n in sorted(numbers) if passed <= n < bound]
        passed = bound


@given(st.dictionaries(st.integers(0, 300), st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 400))
def test_numbers_on_disk_are_found_where_they_were_put(
    tmp_path_factory: pytest.TempPathFactory, values: dict[int, int], window: int
) -> None:
    path = tmp_path_factory.mktemp("numbers") / "new" / "numbers"
    with NumberFile(path) as file:
        for place, value in values.items():
            file.write(place, np.array([value], np.uint64))
        assert file.size == max(values) + 1
        assert file.read(0, file.size).tolist() == [values.get(place, 0) for place in range(file.size)]
        places = np.array(sorted(values), np.uint64)
        assert file.at(places, window=window).tolist() == [values[place] for place in sorted(values)]
        file.append(np.array([7, 8], np.uint64))
        assert file.read(max(values) + 1, 2).tolist() == [7, 8]
        with pytest.raises(DataError, match="got shorter"):
            file.read(max(values), 10)
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Cannot write"):
        NumberFile(tmp_path / "file" / "numbers")
    sort = ExternalSort(tmp_path / "file" / "runs", 1, memory_bytes=1)
    with pytest.raises(StorageError, match="Cannot write"):
        sort.add(np.zeros((40, 1), np.uint64))
