"""A query on a real PostgreSQL server, started here on loopback: streamed, read-only, and cut off in the middle."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pg8000.dbapi
import pytest
import zstandard

from sheepop.data import Corpus
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused
from sheepop.data.extract.query import read_query

from ...command_line import free_port
from ..conftest import Growth

pytestmark = pytest.mark.system

PASSWORD = "s3cr@t/p%w ü"
QUOTED = "s3cr%40t%2Fp%25w%20%C3%BC"


def program(name: str) -> str | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((found for folder in [*folders, None] if (found := shutil.which(name, path=folder))), None)


@dataclass
class Server:
    """A running server: its folder, port and process."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"postgresql://reader:{QUOTED}@127.0.0.1:{self.port}/postgres"

    def execute(self, *statements: str) -> list[Any]:
        """Runs statements as the owner and returns the rows of the last."""
        connection = pg8000.dbapi.connect(
            user="reader", password=PASSWORD, host="127.0.0.1", port=self.port, database="postgres"
        )
        try:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
            return rows
        finally:
            connection.close()


def start(folder: Path, owner: dict[str, Any]) -> Server:
    port = free_port()
    settings = {
        "listen_addresses": "127.0.0.1",
        "fsync": "off",
        "unix_socket_directories": "",
        "timezone": "Asia/Tokyo",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    log = (folder / "log").open("wb")
    with log:
        command = [str(program("postgres")), "-D", str(folder / "data"), "-p", str(port), *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **owner)
    server = Server(folder, port, process)
    for _ in range(1200):  # a minute, which a busy machine may need
        try:
            server.execute("SELECT 1")
            return server
        except (pg8000.dbapi.Error, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.05)
    stop(server)
    pytest.fail(f"the server did not start: {(folder / 'log').read_text(errors='replace')[-2000:]}")


def stop(server: Server) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGQUIT)
    server.process.wait(timeout=30)


@pytest.fixture(scope="module")
def owner() -> dict[str, Any]:
    """Under which user the server runs: it refuses to run as root."""
    if program("initdb") is None or program("postgres") is None:
        pytest.skip("PostgreSQL's initdb and postgres are not installed")
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("there is no user postgres or nobody to run the server as")


@pytest.fixture(scope="module")
def cluster(owner: dict[str, Any]) -> Iterator[Path]:
    """A folder with an empty database, which every server of this module begins with."""
    folder = Path(tempfile.mkdtemp(prefix="sheepop-postgres-"))
    secret = folder / "password"
    secret.write_text(PASSWORD, encoding="utf-8")
    if owner:
        os.chown(folder, owner["user"], owner["group"])
        os.chown(secret, owner["user"], owner["group"])
    options = ["-U", "reader", "--auth=scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "--no-sync"]
    command = [str(program("initdb")), "-D", str(folder / "data"), *options]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd="/", **owner)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(cluster: Path, owner: dict[str, Any]) -> Iterator[Server]:
    running = start(cluster, owner)
    try:
        running.execute(
            "CREATE TABLE books (id int PRIMARY KEY, title text, body text, price numeric, at timestamptz, facts json)",
            """INSERT INTO books VALUES
            (2, 'Zwei', E'zweite Zeile\\n中文 🐑', 2.50, '2024-05-06 12:00+02', '{"a": [1]}'),
            (1, 'Un', 'l''été à la forêt', NULL, 'infinity', NULL), (3, 'Leer', '', 0, NULL, '{}')""",
            "CREATE SEQUENCE counter",
            "CREATE TABLE large AS SELECT i AS id, repeat(md5(i::text), 64) AS text FROM generate_series(1, 100000) i",
        )
        yield running
    finally:
        stop(running)


def found(server: Server, query: str, **settings: Any) -> list[tuple[str, str]]:
    items = read_query(server.url, query, ExtractConfig(**settings))
    return [(item.place, item.text if isinstance(item, Extracted) else f"<{item.reason}>") for item in items]


def test_unicode_comes_through_and_an_empty_text_is_refused(server: Server) -> None:
    assert found(server, "SELECT * FROM books ORDER BY id") == [
        ("row 1", "l'été à la forêt"),
        ("row 2", "zweite Zeile\n中文 🐑"),
        ("row 3", "<empty>"),
    ]


def test_values_of_every_type_are_written_the_same_whatever_the_zone_of_the_server(server: Server) -> None:
    query = (
        "SELECT id, price, at, facts, ARRAY[1, 2] AS list, '{\\x}' AS odd FROM books "
        "WHERE title LIKE 'Z%' OR id % 5 = 1 ORDER BY 1"
    )
    table = (
        "| id | price | at | facts | list | odd |\n| --- | --- | --- | --- | --- | --- |\n"
        "| 1 |  | infinity |  | [1, 2] | {\\x} |\n"
        '| 2 | 2.50 | 2024-05-06T10:00:00+00:00 | {"a": [1]} | [1, 2] | {\\x} |\n'
    )
    assert found(server, query) == [("", table)]
    assert found(server, "SELECT id, facts FROM books WHERE id = 2", template="{id}: {facts.a}") == [
        ("row 1", "2: [1]")
    ]
    assert found(server, "SELECT '12:30:45'::time::text AS text, ':x' AS y") == [("row 1", "12:30:45")]
    query = r"SELECT (ARRAY['a', ':b::c \:y 100% %s %(d)s'])[1:2]::text AS text"
    assert found(server, query) == [("row 1", r'{a,":b::c \\:y 100% %s %(d)s"}')]


@pytest.mark.parametrize(
    ("query", "reason", "words"),
    [
        ("SELECT * FROM nope", "unreadable", 'relation "nope" does not exist'),
        ("SELECT nope FROM books", "unreadable", 'column "nope" does not exist'),
        ("SELECT 1 +", "unreadable", "syntax error"),
        ("SELECT 1 / (id - 2) FROM books", "unreadable", "division by zero"),
        ("DELETE FROM books", "invalid", "it begins with DELETE"),
        ("WITH gone AS (DELETE FROM books RETURNING *) SELECT * FROM gone", "invalid", "it contains DELETE"),
    ],
)
def test_what_is_wrong_with_a_query_is_said(server: Server, query: str, reason: str, words: str) -> None:
    with pytest.raises(ExtractionError) as error:
        found(server, query)
    assert (error.value.reason, words in error.value.detail) == (reason, True), error.value


def test_a_wrong_password_is_not_repeated(server: Server) -> None:
    for secret in ("wrong-secret", QUOTED + "x"):
        with pytest.raises(
            ExtractionError, match=r'unreadable: .*password authentication failed for user "reader"'
        ) as error:
            list(read_query(server.url.replace(QUOTED, secret), "SELECT 1", ExtractConfig()))
        assert secret not in str(error.value)
        assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM books",
        "WITH gone AS (DELETE FROM books RETURNING *) SELECT * FROM gone",
        "SELECT nextval('counter')",
        "SELECT setval('counter', 50)",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "SELECT * INTO copied FROM books",
        "CREATE TABLE x (y int)",
    ],
)
def test_the_server_itself_refuses_what_writes(server: Server, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.data.extract.query.require_reading", lambda query, dialect: None)
    with pytest.raises(ExtractionError, match="unreadable: the query failed"):
        found(server, query)
    assert server.execute("SELECT count(*), (SELECT last_value FROM counter) FROM books") == [[3, 1]]


def test_what_the_server_lets_a_function_write_is_rolled_back(server: Server) -> None:
    written, counted = "SELECT lo_create(0) IS NOT NULL AS done", "SELECT count(*) FROM pg_largeobject_metadata"
    try:
        assert found(server, written) == [("", "| done |\n| --- |\n| true |\n")]
    except ExtractionError as error:
        # From version 16 on the server refuses it.
        assert "read-only" in error.detail
    assert server.execute(counted) == [[0]]


def test_a_transaction_is_left_behind_neither_after_the_end_nor_in_the_middle(server: Server) -> None:
    rows = read_query(server.url, "SELECT * FROM large ORDER BY id", ExtractConfig())
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    found(server, "SELECT 1")
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    for _ in range(1200):  # a minute, which a busy machine may need
        if server.execute(query) == [[0]]:
            return
        time.sleep(0.05)
    pytest.fail("a connection was left open")


# The driver itself does not close the socket on which it waited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_does_not_answer_is_given_up_after_the_time_allowed(server: Server) -> None:
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ExtractionError, match="unreadable: the database cannot be opened"):
            found(server, "SELECT 1", max_seconds=1)
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert found(server, "SELECT 'it is back' AS text") == [("row 1", "it is back")]


def build(server: Server, query: str, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "sheepop", "data", "build", server.url, "--query", query, "--output", str(output)]
    settings = ["tokenizer.algorithm=char", "data.validation_fraction=0", *more]
    return subprocess.run([*program, *settings], capture_output=True, text=True, timeout=300, check=False)


def assert_no_password(place: Path, *texts: str) -> None:
    """Neither plain nor as it stands in the address, in no file below `place` and in none of the texts."""
    files = [path for path in place.rglob("*") if path.is_file()]
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {
        f"{path} unpacked": zstandard.ZstdDecompressor()
        .stream_reader(contents[str(path)], read_across_frames=True)
        .read()
        for path in files
        if path.suffix == ".zst"
    }
    contents |= {f"text {number}": text.encode() for number, text in enumerate(texts)}
    assert contents
    for secret in (PASSWORD, QUOTED, json.dumps(PASSWORD)[1:-1], quote(PASSWORD), quote_plus(PASSWORD), "s3cr"):
        assert [name for name, data in contents.items() if secret.encode() in data] == []


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_corpus_is_built_from_a_query_and_the_password_is_written_nowhere(
    server: Server, tmp_path: Path, workers: str
) -> None:
    output = tmp_path / "corpus"
    query = "SELECT title, body AS text FROM books ORDER BY id"
    done = build(server, query, output, "--workers", workers)
    assert done.returncode == 0, done.stderr
    corpus = Corpus.open(output)
    source = f"postgresql://127.0.0.1:{server.port}/postgres: {query}"
    assert sorted((d.source, d.place, d.text) for d in corpus.documents("train")) == [
        (source, "row 1", "l'été à la forêt"),
        (source, "row 2", "zweite Zeile\n中文 🐑"),
    ]
    (line,) = (output / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(line)["place"], json.loads(line)["reason"]) == ("row 3", "empty")
    assert (corpus.manifest["query"], corpus.manifest["inputs"]) == (query, [])
    assert_no_password(tmp_path, done.stdout, done.stderr)


def test_a_query_that_fails_in_the_middle_is_one_clear_error_and_leaves_no_password_behind(
    server: Server, tmp_path: Path
) -> None:
    query = "SELECT repeat(text, 1 + 0 / (id - 5000)) AS text FROM (SELECT * FROM large ORDER BY id OFFSET 0) AS l"
    output = tmp_path / "corpus"
    # A part that is finished keeps the workplace.
    (tmp_path / "note.txt").write_text("A text of which nothing can go wrong.")
    done = build(server, query, output, str(tmp_path / "note.txt"), "--workers", "2")
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "The query could not be read to its end: after row" in done.stderr
    assert "division by zero" in done.stderr and "Traceback" not in done.stderr
    assert not output.exists() and (tmp_path / ".corpus.building" / "pass-0" / "00000").is_dir()
    assert_no_password(tmp_path, done.stdout, done.stderr)


def length_of_rows(asked: str) -> int:
    url, query = asked.splitlines()
    return sum(len(item.text) for item in read_query(url, query, ExtractConfig()) if isinstance(item, Extracted))


def test_a_large_table_is_streamed_in_little_memory(growth: Growth, server: Server) -> None:
    query = f"{server.url}\nSELECT * FROM large ORDER BY id"
    length, grown = growth(length_of_rows, f"{query} LIMIT 2000", query)
    assert length == 100_000 * 64 * 32
    assert grown < 2**23  # for 205 MB of text


def test_a_server_that_is_killed_in_the_middle_ends_the_rows_with_a_reason(
    server: Server, owner: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    items: list[Extracted | Refused] = []
    query = "SELECT * FROM large ORDER BY id"
    with pytest.raises(ExtractionError, match=r"unreadable: after row \d+: ") as error:
        for item in read_query(server.url, query, ExtractConfig()):
            items.append(item)
            if len(items) == 5000:
                server.process.send_signal(signal.SIGQUIT)
                server.process.wait(timeout=30)
    assert 5000 <= len(items) < 100_000
    assert [item.place for item in items] == [f"row {number}" for number in range(1, len(items) + 1)]
    assert f"after row {len(items)}: " in error.value.detail
    assert PASSWORD not in str(error.value)
    assert capfd.readouterr().err == ""
    with pytest.raises(ExtractionError, match="unreadable: the database cannot be opened"):
        found(server, query)
    again = start(server.folder, owner)
    server.process, server.port = again.process, again.port
    assert found(server, "SELECT title AS text FROM books WHERE id = 1") == [("row 1", "Un")]
