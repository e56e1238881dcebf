"""Parquet and Arrow files: exact text, few columns read, little memory, and damage that ends in a reason."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from sheepop.data.extract import columns
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import detect
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused

from ..conftest import Growth

TEXTS = ["plain words", "ünïcödé 中文 🐑\nsecond line", 'quotes " and | bars', "x" * 5000]
FAR = 5 * 10**17  # microseconds after 1970: a year that datetime does not have


def context(**settings: Any) -> Context:
    return Context(ExtractConfig(**settings), Path("unused"), lambda content, place: iter(()))


def read(path: Path, **settings: Any) -> list[Extracted | Refused]:
    extract = columns.extract_parquet if path.suffix == ".parquet" else columns.extract_arrow
    return list(extract(Content(path.name, path=path), context(**settings)))


def found(items: Iterable[Extracted | Refused]) -> list[tuple[str, str]]:
    """Place and text, or place and reason in brackets."""
    return [(item.place, item.text if isinstance(item, Extracted) else f"<{item.reason}>") for item in items]


def write_parquet(table: pa.Table, path: Path) -> None:
    parquet.write_table(table, path, row_group_size=3)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_feather(table: pa.Table, path: Path) -> None:
    feather.write_feather(table, path, compression="zstd", chunksize=3)


WRITERS = {"a.parquet": write_parquet, "a.arrow": write_file, "a.arrows": write_stream, "a.feather": write_feather}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[pa.Table], Path]:
    """Writes a table in each format in turn."""

    def to_file(table: pa.Table) -> Path:
        path = tmp_path / str(request.param)
        WRITERS[str(request.param)](table, path)
        return path

    return to_file


def test_a_text_column_gives_one_document_for_each_row(write: Callable[[pa.Table], Path]) -> None:
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        path = write(pa.table({"id": range(4), "text": pa.array(TEXTS).cast(kind), "x": [1.5] * 4}))
        assert found(read(path)) == [(f"row {number}", text) for number, text in enumerate(TEXTS, 1)]


def test_column_and_template_reach_nested_values(write: Callable[[pa.Table], Path]) -> None:
    rows = [
        {"title": "A", "meta": {"lang": "en", "tags": ["x", "y"]}, "n": 1},
        {"title": "B", "meta": {"lang": "fr", "tags": []}, "n": 2},
        {"title": "C", "meta": None, "n": 3},
    ]
    path = write(pa.Table.from_pylist(rows))
    template = "{title} ({meta.lang}): {meta.tags}"
    expected = [("row 1", 'A (en): ["x", "y"]'), ("row 2", "B (fr): []"), ("row 3", "<missing>")]
    assert found(read(path, template=template)) == expected
    assert found(read(path, column="meta.lang")) == [("row 1", "en"), ("row 2", "fr"), ("row 3", "<missing>")]
    with pytest.raises(
        ExtractionError, match="missing: there is no column 'tilte' among 'title', 'meta', 'n'; did you"
    ):
        read(path, column="tilte")


def test_conversations_are_recognised(write: Callable[[pa.Table], Path]) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(pa.table({"messages": [turns, turns[:1]], "score": [1, 2]}))
    assert read(path) == [
        Extracted("user:\nHi\n\nassistant:\nHello", "chat", "", "row 1"),
        Extracted("user:\nHi", "chat", "", "row 2"),
    ]


def test_a_table_without_text_becomes_markdown_with_every_type_of_value(write: Callable[[pa.Table], Path]) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9)
    path = write(
        pa.table(
            {
                "n": [1, None],
                "price": pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.25")]),
                "day": pa.array([moment.date(), None]),
                "at": pa.array([1, 2], pa.timestamp("ns")),
                "far": pa.array([FAR, 0], pa.timestamp("us")),
                "took": pa.array([5, 6], pa.duration("s")),
                "ok": [True, False],
                "blob": [b"\xff\x00", b"text"],
                "list": [[1, 2], []],
                "deep": pa.array([[{"at": 1}], None], pa.list_(pa.struct([("at", pa.timestamp("ns"))]))),
            }
        )
    )
    (table,) = read(path)
    assert isinstance(table, Extracted)
    head, _, first, second = table.text.splitlines()
    assert (table.kind, head) == ("table", "| n | price | day | at | far | took | ok | blob | list | deep |")
    far = duckdb.sql(f"SELECT CAST(make_timestamp({FAR}) AS VARCHAR)").fetchall()[0][0] + ".000000"
    tick, tock, zero = (f"1970-01-01 00:00:00.{fraction}" for fraction in ("000000001", "000000002", "000000"))
    deep = f'[{{"at": "{tick}"}}]'
    assert first == f"| 1 | 1.50 | 2024-05-06 | {tick} | {far} | 5 | true | (2 bytes) | [1, 2] | {deep} |"
    assert second == f"|  | 2.25 |  | {tock} | {zero} | 6 | false | text | [] |  |"


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    path = tmp_path / "duck.parquet"
    with duckdb.connect() as connection:
        connection.execute(
            "CREATE TABLE t AS SELECT i AS id, 'Satz Nummer ' || i || ' für alle' AS text FROM range(5000) r(i)"
        )
        connection.execute(f"COPY t TO '{path}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048)")
    assert [text for _, text in found(read(path))] == [f"Satz Nummer {number} für alle" for number in range(5000)]


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    noise = random.Random(1)
    rows = {"text": [f"text {n}" for n in range(2000)], "other": [noise.randbytes(3000) for _ in range(2000)]}
    parquet.write_table(pa.table(rows), path)
    counted = CountedContent(path)
    items = list(columns.extract_parquet(counted, context(column="text")))
    assert len(items) == 2000
    assert counted.num_bytes < path.stat().st_size // 5


class CountedContent(Content):
    """Counts the bytes that are read from the file."""

    num_bytes = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path.name, path=path)

    def open(self) -> Any:
        file, content = super().open(), self

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def read(self, size: int = -1) -> bytes:
                data = file.read(size)
                content.num_bytes += len(data)
                return data

            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *exception: object) -> None:
                file.close()

        return Counted()


def test_a_row_whose_text_is_no_utf_8_is_refused_and_the_others_are_read(write: Callable[[pa.Table], Path]) -> None:
    data = pa.array([b"good one", b"bad \xff", b"good two"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    assert found(read(write(pa.table({"text": text})))) == [
        ("row 1", "good one"),
        ("row 2", "<undecodable>"),
        ("row 3", "good two"),
    ]


def test_a_file_without_rows_or_columns_says_so(write: Callable[[pa.Table], Path]) -> None:
    assert read(write(pa.table({"a": pa.array([], pa.int64())}))) == [Refused("", "empty", "the table has no rows")]
    with pytest.raises(ExtractionError, match="empty: it has no columns"):
        read(write(pa.table({})))


def length_of_columns(path: str) -> int:
    items = columns.extract_parquet(Content("x.parquet", path=Path(path)), context())
    return sum(len(item.text) for item in items if isinstance(item, Extracted))


def test_a_large_file_in_one_row_group_takes_little_memory(growth: Growth, tmp_path: Path) -> None:
    noise = random.Random(1)
    texts = [noise.randbytes(1000).hex() for _ in range(5000)]
    for name, times in (("small", 1), ("large", 20)):
        rows = pa.table({"text": texts * times})
        parquet.write_table(rows, tmp_path / name, row_group_size=10**6, use_dictionary=False, compression="snappy")
    length, grown = growth(length_of_columns, tmp_path / "small", tmp_path / "large")
    assert length == 5000 * 20 * 2000
    assert grown < 2**24  # for 200 MB of text


def test_a_small_file_that_says_the_same_a_million_times_is_a_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 10_000]))
    parquet.write_table(pa.table({"text": text}), path)
    assert path.stat().st_size < 50_000
    items = list(Dispatcher(ExtractConfig(), tmp_path).documents(Content("a.parquet", path=path)))
    assert [item.reason for item in items if isinstance(item, Refused)] == ["bomb"]
    assert len(items) < 10_000


def test_an_encrypted_file_is_said_to_be_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with duckdb.connect() as connection:
        connection.execute("SET force_mbedtls_unsafe = 'true'")
        connection.execute("PRAGMA add_parquet_key('key', '0123456789112345')")
        connection.execute(f"COPY (SELECT 'words' AS text) TO '{path}' (ENCRYPTION_CONFIG {{footer_key: 'key'}})")
    with pytest.raises(ExtractionError, match="encrypted"):
        detect(Content(path.name, path=path))


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_cut_off_or_something_else_is_damaged(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](pa.table({"text": ["some words"] * 10}), path)
    data = path.read_bytes()
    for wrong in (data[: len(data) // 2], b"", b"PAR1", b"ARROW1\0\0", b"no such format " * 100):
        path.write_bytes(wrong)
        with pytest.raises(ExtractionError, match=r"damaged|empty"):
            read(path)


def test_damage_after_good_rows_gives_those_rows_first(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} " + random.Random(number).randbytes(500).hex() for number in range(3000)]
    parquet.write_table(pa.table({"text": texts}), path, use_dictionary=False, row_group_size=1000, compression="zstd")
    data = bytearray(path.read_bytes())
    data[-200_000:-100_000] = bytes(100_000)
    path.write_bytes(data)
    items: list[Extracted | Refused] = []
    with pytest.raises(ExtractionError, match="damaged"):
        for item in columns.extract_parquet(Content("a", path=path), context()):
            items.append(item)
    assert [text for _, text in found(items)][:1000] == texts[:1000]


NUM_DAMAGED = "60"
FUZZ = """
import random, resource, sys
from pathlib import Path
from sheepop.data.extract.columns import extract_arrow, extract_parquet
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, ExtractionError
resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))
context = Context(ExtractConfig(), Path(), lambda content, place: iter(()))
outcomes = dict()
for path in map(Path, sys.argv[2:]):
    extract = extract_parquet if path.suffix == ".parquet" else extract_arrow
    whole = path.read_bytes()
    for seed in range(int(sys.argv[1])):
        noise, data = random.Random(seed), bytearray(whole)
        for _ in range(noise.choice((1, 3, 30))):
            data[noise.randrange(len(data))] = noise.choice((0, 1, 127, 128, 255, noise.randrange(256)))
        try:
            for item in extract(Content("a", data=bytes(data)), context):
                outcomes[type(item).__name__] = outcomes.get(type(item).__name__, 0) + 1
        except ExtractionError as error:
            outcomes[error.reason] = outcomes.get(error.reason, 0) + 1
        except MemoryError:
            outcomes["memory"] = outcomes.get("memory", 0) + 1
print(outcomes)
"""


@pytest.mark.parametrize("name", WRITERS)
def test_flipped_bytes_end_in_a_reason_and_never_in_a_crash(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    table = pa.table({"text": TEXTS * 3, "n": range(12), "tags": [["a", "b"]] * 12, "kind": pa.array(["x", "y"] * 6)})
    WRITERS[name](table, path)
    command = [sys.executable, "-c", FUZZ, NUM_DAMAGED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    outcomes = json.loads(done.stdout.replace("'", '"'))
    assert outcomes["damaged"] > 0
    assert outcomes["Extracted"] > 0
