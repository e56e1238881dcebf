"""Database files and queries: every table in a fixed order, nothing written, no password shown."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from sqlalchemy import make_url

from sheepop.data.extract import database
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.query import (
    connect_arguments,
    is_ordered,
    parse_address,
    read_query,
    require_reading,
    source_label,
    without_secrets,
)

TEXTS = ["plain words", "ünïcödé 中文 🐑\nsecond line", "with \0 inside it"]


def read(path: Path, **settings: Any) -> list[Extracted | Refused]:
    scratch = path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    context = Context(ExtractConfig(**settings), scratch, lambda content, place: iter(()))
    extract = database.extract_duckdb if path.suffix == ".duckdb" else database.extract_sqlite
    return list(extract(Content(path.name, path=path), context))


def found(items: Iterable[Extracted | Refused]) -> list[tuple[str, str]]:
    """Place and text, or place and reason in brackets."""
    return [(item.place, item.text if isinstance(item, Extracted) else f"<{item.reason}>") for item in items]


def sqlite(path: Path, script: str, rows: Iterable[tuple[str, Iterable[tuple[Any, ...]]]] = ()) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    for statement, values in rows:
        connection.executemany(statement, values)
    connection.commit()
    connection.close()
    return path


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


# SQLite


def test_every_table_is_read_in_the_order_of_names_and_rows(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite",
        """CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, at REAL);
        CREATE TABLE "odd ""name" (k TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
        CREATE TABLE measures (rowid TEXT, n INTEGER, x REAL, b BLOB);
        CREATE VIEW seen AS SELECT body AS text FROM notes;
        INSERT INTO "odd ""name" VALUES ('b', 'text of b'), ('a', 'text of a');
        INSERT INTO measures VALUES ('z', 1, 0.5, x'ff00'), ('y', NULL, 1e300, NULL);""",
        [("INSERT INTO notes VALUES (?, ?, 1.5)", [(30 - n, value) for n, value in enumerate(TEXTS)])],
    )
    table = "| rowid | n | x | b |\n| --- | --- | --- | --- |\n| z | 1 | 0.5 | (2 bytes) |\n| y |  | 1e+300 |  |\n"
    before = bytes_below(tmp_path)
    assert found(read(path)) == [
        ("table measures", table),
        *((f"table notes row {number}", value) for number, value in enumerate(reversed(TEXTS), 1)),
        ('table odd "name row 1', "text of a"),
        ('table odd "name row 2', "text of b"),
    ]
    assert bytes_below(tmp_path) == before


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the program sqlite3 is not installed")
def test_a_database_of_the_sqlite_program_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    script = "CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('from the shell'), ('zwölf Boxkämpfer');"
    subprocess.run(["sqlite3", str(path)], input=script.encode(), check=True)
    assert found(read(path)) == [("table t row 1", "from the shell"), ("table t row 2", "zwölf Boxkämpfer")]


def test_the_column_that_is_asked_for_is_taken_from_the_tables_that_have_it(tmp_path: Path) -> None:
    script = """CREATE TABLE a (title TEXT, note TEXT); INSERT INTO a VALUES ('T', 'N');
                CREATE TABLE b (x TEXT); INSERT INTO b VALUES ('other');"""
    path = sqlite(tmp_path / "a.sqlite", script)
    assert found(read(path, column="note")) == [("table a row 1", "N"), ("table b", "<missing>")]
    assert found(read(path, template="{title}: {note}"))[0] == ("table a row 1", "T: N")
    with pytest.raises(
        ExtractionError, match="missing: there is no column 'notes' among 'title', 'note'; did you mean"
    ):
        read(path, column="notes")


def test_bad_rows_are_refused_and_the_others_read(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite",
        """CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('one of five'), (CAST(x'ff41' AS TEXT)), ('three of five');
        INSERT INTO t VALUES (zeroblob(9000)), (''), ('six of five');""",
    )
    assert found(read(path, max_document_bytes=4096)) == [
        ("table t row 1", "one of five"),
        ("table t row 2", "<undecodable>"),
        ("table t row 3", "three of five"),
        ("table t row 4", "<oversized>"),
        ("table t row 5", "<empty>"),
        ("table t row 6", "six of five"),
    ]


def test_virtual_tables_and_logs_that_were_not_written_back_are_said_to_be_left_out(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite", "CREATE VIRTUAL TABLE v USING fts5(text); INSERT INTO v VALUES ('hidden words')"
    )
    assert found(read(path)) == [("table v", "<unsupported>")]
    path = tmp_path / "b.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "PRAGMA journal_mode = WAL; CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('in the log')"
    )
    assert found(read(path))[0] == ("the log -wal", "<unsupported>")
    connection.close()
    assert found(read(path)) == [("table t row 1", "in the log")]


def test_a_computed_column_that_makes_gigabytes_is_a_bomb(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite",
        """CREATE TABLE t (n INTEGER, text TEXT GENERATED ALWAYS AS (printf('%.*c', 4000000, 'x')));
        WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 2000)
        INSERT INTO t(n) SELECT n FROM c;""",
    )
    items = list(Dispatcher(ExtractConfig(), tmp_path).documents(Content(path.name, path=path)))
    assert [item.reason for item in items if isinstance(item, Refused)] == ["bomb"]
    assert len(items) < 100


def test_damage_in_one_table_leaves_the_others(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite",
        """PRAGMA page_size = 1024; CREATE TABLE a (text TEXT); CREATE TABLE b (text TEXT);
        INSERT INTO b VALUES ('safe text');""",
        [("INSERT INTO a VALUES (?)", [(f"text number {number} " + "x" * 300,) for number in range(1000)])],
    )
    data = bytearray(path.read_bytes())
    at = data.index(b"text number 500 ") // 1024 * 1024
    data[at : at + 1024] = b"\xff" * 1024
    path.write_bytes(data)
    items = found(read(path))
    assert len([1 for _, value in items if value.startswith("text number")]) > 100
    assert [value for place, value in items if place == "table a"] == ["<damaged>"]
    assert items[-1] == ("table b row 1", "safe text")


def test_what_is_no_database_is_encrypted_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ExtractionError, match="encrypted: it is not a SQLite database, or it is encrypted"):
        read(path)
    sqlite(tmp_path / "b.sqlite", "CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('words here')")
    data = (tmp_path / "b.sqlite").read_bytes()
    path.write_bytes(data[:100] + b"\xff" * 4000)
    with pytest.raises(ExtractionError, match="damaged"):
        read(path)


@pytest.mark.parametrize("name", ["with ? and # and %41.sqlite", "ü\nnew line.sqlite"])
def test_odd_file_names_lead_to_the_right_file(tmp_path: Path, name: str) -> None:
    path = sqlite(tmp_path / name, "CREATE TABLE t (text TEXT); INSERT INTO t VALUES ('words here')")
    assert found(read(path)) == [("table t row 1", "words here")]


FUZZ = """
import random, sys
from pathlib import Path
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.database import extract_duckdb, extract_sqlite
from sheepop.data.extract.interface import Content, Context, ExtractionError
path, scratch = Path(sys.argv[2]), Path(sys.argv[3])
context = Context(ExtractConfig(), scratch, lambda content, place: iter(()))
extract = extract_duckdb if path.suffix == ".duckdb" else extract_sqlite
whole, outcomes = path.read_bytes(), dict()
for seed in range(int(sys.argv[1])):
    noise, data = random.Random(seed), bytearray(whole)
    for _ in range(noise.choice((1, 10, 100))):
        data[noise.randrange(len(data))] = noise.choice((0, 1, 127, 128, 255, noise.randrange(256)))
    damaged = scratch / "damaged"
    damaged.write_bytes(data)
    try:
        for item in extract(Content("a", path=damaged), context):
            outcomes[type(item).__name__] = outcomes.get(type(item).__name__, 0) + 1
    except ExtractionError as error:
        outcomes[error.reason] = outcomes.get(error.reason, 0) + 1
print(outcomes)
"""
NUM_DAMAGED = "100"


def test_flipped_bytes_end_in_a_reason_and_never_in_a_crash(tmp_path: Path) -> None:
    path = sqlite(
        tmp_path / "a.sqlite",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT); CREATE INDEX i ON t (text); CREATE TABLE u (a, b);"
        "INSERT INTO u VALUES (1, 2.5), ('x', x'00');",
        [("INSERT INTO t (text) VALUES (?)", [(f"{value} {number}",) for number in range(100) for value in TEXTS])],
    )
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-c", FUZZ, NUM_DAMAGED, str(path), str(tmp_path / "scratch")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    assert json.loads(done.stdout.replace("'", '"'))["Extracted"] > 1000


# DuckDB


@pytest.fixture
def duck(tmp_path: Path) -> Path:
    path = tmp_path / "a.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            """CREATE TABLE notes (id INTEGER, text VARCHAR, tags VARCHAR[], written TIMESTAMPTZ);
            CREATE SCHEMA s;
            CREATE TABLE s.cells (a INTEGER, d DATE, m STRUCT(x INTEGER, y VARCHAR), h HUGEINT, f DOUBLE);
            CREATE VIEW v AS SELECT text FROM notes;
            INSERT INTO s.cells VALUES (1, '2024-05-06', {x: 1, y: 'é'}, 170141183460469231731687303715884105727, 0.5);
            INSERT INTO s.cells VALUES (NULL, '20000-01-01', NULL, 2, 'nan');
            INSERT INTO notes SELECT i, 'note number ' || i, ['a'], NULL FROM range(5000) r(i)"""
        )
    return path


def test_every_table_of_duckdb_is_read(duck: Path) -> None:
    before = bytes_below(duck.parent)
    items = found(read(duck))
    assert items[:5000] == [(f"table notes row {number + 1}", f"note number {number}") for number in range(5000)]
    assert items[5000:] == [
        (
            "table s.cells",
            "| a | d | m | h | f |\n| --- | --- | --- | --- | --- |\n"
            '| 1 | 2024-05-06 | {"x": 1, "y": "é"} | 170141183460469231731687303715884105727 | 0.5 |\n'
            "|  | 20000-01-01 |  | 2 | NaN |\n",
        )
    ]
    assert bytes_below(duck.parent) == before
    assert found(read(duck, template="{id}: {tags}"))[:2] == [
        ("table notes row 1", '0: ["a"]'),
        ("table notes row 2", '1: ["a"]'),
    ]


def test_a_duckdb_file_that_is_damaged_or_encrypted_says_so(duck: Path) -> None:
    data = duck.read_bytes()
    duck.write_bytes(b"x" * 20_000)
    with pytest.raises(
        ExtractionError, match=r"damaged: IO Error: The file \"the file\" exists, but it is not a valid"
    ):
        read(duck)
    for first in range(20_000, len(data), 2**18):
        data = data[:first] + bytes(1000) + data[first + 1000 :]
    duck.write_bytes(data)
    with pytest.raises(ExtractionError, match="damaged"):
        read(duck)
    duck.write_bytes(data[:9000])
    with pytest.raises(ExtractionError, match="damaged"):
        read(duck)
    locked = duck.with_name("locked.duckdb")
    with duckdb.connect() as connection:
        connection.execute("SET force_mbedtls_unsafe = 'true'")
        connection.execute(
            f"ATTACH '{locked}' AS e (ENCRYPTION_KEY 'secret'); CREATE TABLE e.t AS SELECT 'words' AS text"
        )
    with pytest.raises(ExtractionError, match="encrypted"):
        read(locked)


def test_what_duckdb_has_not_yet_written_back_is_read_from_its_log(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    program = (
        "import duckdb, os, sys; c = duckdb.connect(sys.argv[1])\n"
        "c.execute('CREATE TABLE t (text VARCHAR); CHECKPOINT')\n"
        "c.execute('INSERT INTO t VALUES (?)', ['only in the log']); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    before = bytes_below(tmp_path)
    assert "a.duckdb.wal" in before
    assert found(read(path)) == [("table t row 1", "only in the log")]
    assert bytes_below(tmp_path) == before


def test_flipped_bytes_of_a_duckdb_file_end_in_a_reason_and_never_in_a_crash(duck: Path) -> None:
    (duck.parent / "scratch").mkdir()
    command = [sys.executable, "-c", FUZZ, "25", str(duck), str(duck.parent / "scratch")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")


# Queries


def asked(url: str, query: str, **settings: Any) -> list[tuple[str, str]]:
    return found(read_query(url, query, ExtractConfig(**settings)))


@pytest.fixture
def address(tmp_path: Path) -> str:
    path = sqlite(
        tmp_path / "a.db",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, title TEXT, body TEXT);"
        "INSERT INTO t VALUES (2, 'B', 'body of b'), (1, 'A', 'body of a'), (3, 'C', 'at 12:30 %s :x ::y');",
    )
    return f"sqlite:///{path}"


def test_the_rows_of_a_query_become_documents(address: str) -> None:
    bodies = ["body of a", "body of b", "at 12:30 %s :x ::y"]
    assert asked(address, "SELECT * FROM t ORDER BY id") == [(f"row {n}", body) for n, body in enumerate(bodies, 1)]
    assert asked(address, "SELECT title, id FROM t WHERE body LIKE '%12:30%'", template="{title}{id}") == [
        ("row 1", "C3")
    ]
    table = "| a | b |\n| --- | --- |\n| :x 5:10 | \\:y \\z |\n"
    assert asked(address, r"SELECT ':x 5:10' AS a, '\:y \z' AS b") == [("", table)]
    with pytest.raises(ExtractionError, match="missing: there is no column 'txt' among 'id', 'body'"):
        asked(address, "SELECT id, body FROM t", column="txt")


def test_a_text_that_is_longer_than_a_document_is_cut_like_that_of_a_file(address: str) -> None:
    pieces = asked(address, "SELECT replace(hex(zeroblob(600)), '0', 'some words\n') AS text", max_document_bytes=2**13)
    assert "".join(text for _, text in pieces) == "some words\n" * 1200
    assert [place for place, _ in pieces] == ["row 1, piece 1", "row 1, piece 2"]
    assert max(len(text) for _, text in pieces) <= 2**13


def test_a_query_on_duckdb_is_answered_without_another_driver(duck: Path) -> None:
    assert asked(f"duckdb:///{duck}", "SELECT text FROM notes WHERE id < 2 ORDER BY id") == [
        ("row 1", "note number 0"),
        ("row 2", "note number 1"),
    ]
    with pytest.raises(ExtractionError, match=r"unreadable: .*nope"):
        asked(f"duckdb:///{duck}", "SELECT * FROM nope")
    with pytest.raises(ExtractionError, match=r"unreadable: .*disabled"):
        asked(f"duckdb:///{duck}", "SELECT * FROM read_csv('/etc/passwd')")


@pytest.mark.parametrize(
    ("url", "query", "reason", "words"),
    [
        ("sqlite:///{}", "SELECT * FROM nope", "unreadable", "no such table: nope"),
        ("sqlite:///{}", "SELECT nope FROM t", "unreadable", "no such column: nope"),
        ("sqlite:///{}", "SELECT 1 +", "unreadable", "incomplete input"),
        ("sqlite:///{}", "DROP TABLE t", "invalid", "it begins with DROP"),
        ("sqlite:///{}x", "SELECT 1", "missing", "there is no database file"),
        ("sqlite:///{}?mode=rwc", "SELECT 1", "invalid", "give the path of the file alone"),
        ("sqlite://", "SELECT 1", "invalid", "give the path of the file alone"),
        ("mssql+pyodbc://u:hunter2@h/d", "SELECT 1", "not_installed", "the driver pyodbc is not installed"),
        ("nosuch://u:hunter2@h/d", "SELECT 1", "not_installed", "nosuch is not a known kind of database"),
        ("no address, hunter2", "SELECT 1", "invalid", "it must look like postgresql://"),
        ("postgresql://u:hunter2@/x@h/d", "SELECT 1", "invalid", "write %40 for @"),
        ("postgresql://u:hunter2@127.0.0.1:1/d", "SELECT 1", "unreadable", "the database cannot be opened"),
        ("postgresql://u:hunter2@127.0.0.1:1/d?sslmode=sometimes", "SELECT 1", "invalid", "sslmode=sometimes"),
        ("postgresql://u:hunter2@127.0.0.1:1/d?colour=red", "SELECT 1", "unreadable", "colour"),
    ],
)
def test_what_cannot_be_honoured_is_named_without_the_password(
    tmp_path: Path, address: str, url: str, query: str, reason: str, words: str
) -> None:
    with pytest.raises(ExtractionError) as error:
        asked(url.format(address.removeprefix("sqlite:///")), query)
    assert error.value.reason == reason
    assert words in error.value.detail
    assert "hunter2" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert not list(tmp_path.glob("a.dbx"))


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO t VALUES (9, '', '')",
        "UPDATE t SET title = 'x'",
        "DELETE FROM t",
        "REPLACE INTO t VALUES (1, '', '')",
        "WITH x AS (SELECT 1) DELETE FROM t",
        "WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x",
        "WITH x AS (SELECT 9) INSERT INTO t SELECT 9, '', '' FROM x",
        "WITH x AS (SELECT 9 AS id) REPLACE INTO t SELECT id, '', '' FROM x",
        "SELECT 1; DELETE FROM t",
        "SELECT ';' ; DELETE FROM t; --",
        "SELECT 1 -- comment\n; DELETE FROM t",
        "SELECT 1 /* ; */ ; DELETE FROM t",
        "/* SELECT */ DELETE FROM t",
        "-- SELECT\nDELETE FROM t",
        "SELECT * INTO copy FROM t",
        "SELECT 1 /* /* */ ; DELETE FROM t -- */",
        "SELECT 1 /*! ; DELETE FROM t */",
        "SELECT 1 /*!50000 INTO OUTFILE '/tmp/x' */",
        "SELECT 1 --DELETE FROM t",
        "SELECT 'it\\'; DELETE FROM t; -- '",
        'SELECT "a\\"; DELETE FROM t; -- "',
        "SELECT [a'b]; DELETE FROM t WHERE title = '[c]'",
        "SELECT 'open ; DELETE FROM t",
        "SELECT 1 /* open ; DELETE FROM t",
        "SELECT * FROM t FOR UPDATE",
        "PRAGMA user_version = 5",
        "ATTACH 'x.db' AS x",
        "VACUUM",
        "EXPLAIN ANALYZE DELETE FROM t",
        "",
        "-- nothing",
        ";",
        "(((",
    ],
)
def test_statements_that_write_or_may_are_refused_before_the_database_sees_them(address: str, query: str) -> None:
    with pytest.raises(ExtractionError):
        require_reading(query, "sqlite")
    with pytest.raises(ExtractionError, match="invalid: the query is refused"):
        asked(address, query)


@pytest.mark.parametrize(
    ("query", "dialect"),
    [
        ("SELECT 1", ""),
        ("  -- note\n select 1 ; ;\n-- end", ""),
        ("(SELECT 1) UNION (SELECT 2)", ""),
        ("WITH a AS (SELECT 1 AS x), b AS (SELECT 2) SELECT * FROM a, b", ""),
        ("VALUES (1, 'a; DELETE FROM t')", ""),
        ("TABLE t", "postgresql"),
        ("SELECT 'DELETE FROM t; it''s text', \"update\", t.delete FROM t", ""),
        ("SELECT replace(a, 'x', 'y'), insert(a, 1, 2, 'z'), last_update, deleted FROM t /* update */ -- into", ""),
        ("SELECT $$ DELETE FROM t; $$, $a$ ' $a$, $1, a$b FROM t", "postgresql"),
        ("SELECT `update` FROM `into`", "mysql"),
        ("SELECT [update] FROM [my table]", "mssql"),
        ("SELECT a['key'], b #>> '{x,y}', c::text, d->>'e' FROM t", "postgresql"),
        ("SELECT 'C:\\dir\\file', E'tab\\t'", "postgresql"),
    ],
)
def test_statements_that_only_read_pass(query: str, dialect: str) -> None:
    require_reading(query, dialect)


@pytest.mark.parametrize(
    ("query", "dialect"),
    [
        ("SELECT $$ x $$; DELETE FROM t; SELECT $$ y $$", "postgresql"),
        ("SELECT $$ ' $$; DELETE FROM t; SELECT $$ ' $$", "postgresql"),
        ("SELECT $a$ $b$ $a$; DELETE FROM t -- $b$", "postgresql"),
        ("SELECT $$; DELETE FROM t; SELECT $$", "mysql"),
        ("SELECT 1 # '\n; DELETE FROM t -- '", "mysql"),
        ("SELECT `a' ; DELETE FROM t; -- '`", "postgresql"),
        ("SELECT q'[it's]'; DELETE FROM t; --'", "oracle"),
    ],
)
def test_quotes_of_one_database_do_not_hide_writes_in_another(query: str, dialect: str) -> None:
    with pytest.raises(ExtractionError):
        require_reading(query, dialect)


def test_a_write_that_gets_past_the_words_is_refused_by_the_database(
    address: str, duck: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sheepop.data.extract.query.require_reading", lambda query, dialect: None)
    for url in (address, f"duckdb:///{duck}"):
        path = Path(url.split("///")[1])
        before = path.read_bytes()
        for query in ("DELETE FROM t RETURNING id", "CREATE TABLE x (y INTEGER)", "DELETE FROM notes RETURNING id"):
            with pytest.raises(ExtractionError, match=r"read.?only|no such table|does not exist"):
                asked(url, query)
        assert path.read_bytes() == before
    with pytest.raises(ExtractionError, match="too many attached databases"):
        asked(address, f"ATTACH '{duck.parent / 'new.db'}' AS x")
    assert not (duck.parent / "new.db").exists()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT * FROM t ORDER BY id", True),
        ("select * from t order  by id limit 5", True),
        ("(SELECT * FROM t ORDER BY id)", True),
        ("WITH a AS (SELECT 1) SELECT * FROM a ORDER BY 1", True),
        ("SELECT * FROM t", False),
        ("SELECT * FROM (SELECT * FROM t ORDER BY id) AS s", False),
        ("SELECT row_number() OVER (ORDER BY id) FROM t", False),
        ("SELECT 'ORDER BY' FROM t -- ORDER BY id", False),
        ("SELECT order_by FROM t", False),
        ("SELECT 'open", False),
    ],
)
def test_whether_a_query_orders_its_rows_is_told(query: str, expected: bool) -> None:
    assert is_ordered(query, "postgresql") is expected


@pytest.mark.parametrize(
    ("url", "label"),
    [
        (
            "postgresql+psycopg2://me:hunter2@db.example.org:5433/books?sslmode=require",
            "postgresql://db.example.org:5433/books",
        ),
        ("postgres://me:hunter2@h/books", "postgresql://h/books"),
        ("mysql+pymysql://h/books?password=hunter2", "mysql://h/books"),
        ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db"),
        ("postgresql://me:hunter2@/x@h/d", "postgresql://..."),
        ("hunter2", "a database"),
        ("hunter2://", "hunter2:///"),
    ],
)
def test_the_label_of_a_database_shows_no_credentials(url: str, label: str) -> None:
    assert source_label(url) == label


def test_passwords_are_cut_out_of_messages_in_every_spelling() -> None:
    url = make_url("mysql://u:p%40ss%2Fw%20d@h/d?ssl_key=x&password=other")
    message = "p@ss/w d, p%40ss%2Fw%20d, p%40ss%2Fw+d, other"
    assert without_secrets(message, url) == "***, ***, ***, ***"


def test_drivers_are_told_how_long_to_wait_and_how_to_encrypt() -> None:
    url, arguments = connect_arguments(parse_address("postgresql://u@h/d?sslmode=verify-full"), 12.4)
    assert (url.drivername, dict(url.query), arguments["timeout"]) == ("postgresql+pg8000", {}, 12)
    assert arguments["ssl_context"].check_hostname
    _, arguments = connect_arguments(parse_address("postgresql://u@h/d?sslmode=require"), 1)
    assert not arguments["ssl_context"].check_hostname
    assert "ssl_context" not in connect_arguments(parse_address("postgresql://u@h/d?sslmode=prefer"), 1)[1]
