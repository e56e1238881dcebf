"""The beginning of a file within a limit: whole rows and lines, and never more bytes than allowed."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.core.hub import Contents, HubFile
from sheepop.download.excerpt import can_be_cut, excerpt_name, first_bytes, take_excerpt

CONTENTS = Contents("o/d", "a" * 40, (), {})
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


class Counted(io.BytesIO):
    """A file that counts the bytes that are read of it."""

    sent = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.sent += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Bytes:
    """A hub that has one file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.opened = data, Counted()

    def open(self, contents: Contents, file: HubFile, size: int | None = None, cache: str = "") -> Counted:
        self.opened = Counted(self.data[:size])
        return self.opened

    def take(self, path: str, target: Path, limit: int) -> bool:
        file = HubFile(path, len(self.data), None, None)
        return take_excerpt(self, CONTENTS, file, target, limit)  # type: ignore[arg-type]


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join("".join(chosen.choices("abcdefghij", k=chosen.randint(1, 9))) for _ in range(count))


@cache
def texts_of(rows: int) -> list[str]:
    return [words(i, 12) for i in range(rows)]


def table(rows: int) -> pa.Table:
    texts = texts_of(rows)
    return pa.table({"id": pa.array(range(rows), pa.int32()), "text": texts, "tags": [[t[:3]] for t in texts]})


def parquet(data: pa.Table, row_group_size: int, **options: object) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(data, buffer, row_group_size=row_group_size, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("row_group_size", [100, 1000, 10_000])
def test_rows_of_parquet_come_within_the_limit_and_are_the_first_ones(tmp_path: Path, row_group_size: int):
    data = table(10_000)
    hub = Bytes(parquet(data, row_group_size, data_page_size=2**14, use_dictionary=False))
    limit = len(hub.data) // 2
    assert hub.take("a/b.parquet", tmp_path / "out.parquet", limit)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found == data.slice(0, found.num_rows)
    # The rows are not equally large.
    assert 4700 < found.num_rows < 5300
    # Half of the bytes, 64 kB for the end of the file, and what is read ahead of each column.
    assert hub.opened.sent < limit + 2**16 + 4 * 2**14


def test_the_same_limit_gives_the_same_file(tmp_path: Path):
    content = parquet(table(3000), 500)
    for name in ("one", "two"):
        Bytes(content).take("b.parquet", tmp_path / name, 150_000)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_limit_below_a_row_gives_nothing(tmp_path: Path):
    assert not Bytes(parquet(table(30), 10)).take("a.parquet", tmp_path / "out", 20)


@pytest.mark.parametrize("damage", ["cut", "footer", "magic", "empty"])
def test_what_is_no_parquet_is_named(tmp_path: Path, damage: str):
    content = parquet(table(100), 50)
    damaged = {
        "cut": content[:-100],
        "footer": content[:-200] + bytes(150) + content[-50:],
        "magic": b"hello, hello" * 50,
        "empty": b"x",
    }[damage]
    with pytest.raises(DataError, match=r"a\.parquet is not a complete Parquet file"):
        Bytes(damaged).take("a.parquet", tmp_path / "out", 10**6)


@cache
def lines() -> bytes:
    return "".join(json.dumps({"text": words(i, 20), "é": "ü"}) + "\n" for i in range(4000)).encode()


@pytest.mark.parametrize("compression", COMPRESS)
def test_lines_come_within_the_limit_and_are_whole(tmp_path: Path, compression: str):
    hub = Bytes(COMPRESS[compression](lines()))
    limit = len(hub.data) // 3
    assert hub.take(f"a.jsonl{compression}", tmp_path / "out", limit)
    found = (tmp_path / "out").read_bytes()
    assert found.endswith(b"\n") and lines().startswith(found)
    # bzip2 and zstd work on blocks of 100 and 131 kB here, of which a part is of no use.
    assert abs(len(found) - len(lines()) // 3) < (131_072 if compression in (".bz2", ".zst") else 40_000)


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_line_longer_than_the_limit_gives_nothing(tmp_path: Path, compression: str):
    content = random.Random(1).randbytes(300_000).replace(b"\n", b" ")
    assert not Bytes(COMPRESS[compression](content)).take(f"a.txt{compression}", tmp_path / "out", 10_000)


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_text_that_grows_without_end_is_refused(tmp_path: Path, compression: str):
    bomb = COMPRESS[compression](bytes(30 * 2**20))
    with pytest.raises(DataError, match=r"a\.txt.* grows more than 50 times"):
        Bytes(bomb).take(f"a.txt{compression}", tmp_path / "out", len(bomb) - 1)
    assert (tmp_path / "out").stat().st_size < 2**24


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_compression_is_named(tmp_path: Path, compression: str):
    with pytest.raises(DataError, match=r"a\.txt\.\w+ is damaged"):
        Bytes(b"this is no compressed file at all\n" * 100).take(f"a.txt{compression}", tmp_path / "out", 1000)


def test_one_json_array_cannot_be_cut_but_lines_under_that_name_can(tmp_path: Path):
    with pytest.raises(DataError, match="a single JSON array"):
        Bytes(json.dumps([{"a": 1}] * 999, indent=1).encode()).take("a.json", tmp_path / "out", 1000)
    Bytes(lines()).take("a.json", tmp_path / "out", 1000)
    assert all(json.loads(line) for line in (tmp_path / "out").read_text().splitlines())


FIELDS = st.text(st.sampled_from('ab,"\n\r é'), max_size=8)


@given(st.lists(st.lists(FIELDS, min_size=2, max_size=3), min_size=1, max_size=8), st.data())
@settings(max_examples=100)
def test_rows_of_csv_are_cut_where_the_csv_library_ends_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], data: st.DataObject
):
    def written(count: int) -> bytes:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(rows[:count])
        return buffer.getvalue().encode()

    content = written(len(rows))
    limit = data.draw(st.integers(1, len(content)))
    target = tmp_path_factory.getbasetemp() / "rows.csv"
    Bytes(content).take("a.csv", target, limit)
    ends = [len(written(count)) for count in range(len(rows) + 1)]
    assert len(target.read_bytes()) == max(end for end in ends if end <= limit)


def test_csv_with_line_ends_in_its_fields_is_cut_between_rows(tmp_path: Path):
    rows = [["id", "text"], *([str(i), f'line one\nline "two" of {i}\n'] for i in range(500))]
    buffer = io.StringIO()
    csv.writer(buffer).writerows(rows)
    Bytes(buffer.getvalue().encode()).take("a.csv", tmp_path / "out", 5000)
    with (tmp_path / "out").open(newline="") as file:
        found = list(csv.reader(file))
    assert found == rows[: len(found)] and 130 < len(found) < 150


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b.parquet", "a/b.excerpt.parquet"),
        ("b.jsonl.gz", "b.excerpt.jsonl"),
        ("x/y.z.TXT.zst", "x/y.z.excerpt.txt"),
        ("json.json", "json.excerpt.json"),
    ],
)
def test_an_excerpt_has_a_name_that_says_so(path: str, name: str):
    assert excerpt_name(path) == name and can_be_cut(path)


def test_what_has_no_ends_inside_is_not_cut():
    assert not can_be_cut("a.arrow")


def test_the_first_bytes_are_decompressed():
    for compression, compress in COMPRESS.items():
        hub = Bytes(compress(lines()[:100_000]))
        file = HubFile(f"a.jsonl{compression}", len(hub.data), None, None)
        beginning = first_bytes(hub, CONTENTS, file, 40_000)  # type: ignore[arg-type]
        assert lines().startswith(beginning) and hub.opened.sent <= 40_000
        assert len(beginning) > 10_000
