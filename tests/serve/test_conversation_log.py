"""The log of a server: every record is read again, and what happened to its files since is noticed."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import DataError, OutputError, StorageError
from sheepop.serve import conversation_log
from sheepop.serve.conversation_log import SUFFIX, ConversationLog, LogFaults, check_sum, read_log

_OPEN: list[ConversationLog] = []


@pytest.fixture(autouse=True)
def close_logs() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def made(directory: Path, **more: Any) -> ConversationLog:
    _OPEN.append(ConversationLog(directory, **{"max_bytes": 2**30, "max_days": 90, **more}))
    return _OPEN[-1]


def read(directory: Path) -> tuple[list[Any], LogFaults]:
    faults = LogFaults()
    return [logged.record["n"] for logged in read_log(directory, faults)], faults


def written(directory: Path, count: int) -> Path:
    log = made(directory)
    for number in range(count):
        log.append({"n": number})
    log.close()
    (path,) = directory.glob(f"*{SUFFIX}")
    return path


def test_records_are_read_in_order_from_all_processes(tmp_path: Path) -> None:
    logs = [made(tmp_path) for _ in range(2)]
    for number in range(6):
        logs[number % 2].append({"n": number})
    # The logs are still open: a process may be killed.
    found, faults = read(tmp_path)
    assert sorted(found) == list(range(6)) and faults == LogFaults()
    places = [logged.place for logged in read_log(tmp_path, LogFaults())]
    assert len(set(places)) == 6
    name, line = places[0].rsplit(":", 1)
    assert json.loads((tmp_path / name).read_text().splitlines()[int(line) - 1])["n"] == found[0]


def test_personal_data_and_secrets_never_reach_the_disk(tmp_path: Path) -> None:
    log = made(tmp_path)
    mail, key = "jane.doe@sheep-farm.org", "AKIA" + "Q3EGRIT7ZXLM2N4V"
    content = [{"role": "user", "content": f"I am {mail}, my key is {key}"}, {"role": "user", "content": f"<{mail}>"}]
    log.append({"n": 0}, messages=content, tools=[{"name": "f", "arguments": {"to": [mail]}}])
    (path,) = tmp_path.glob("*")
    assert mail.encode() not in path.read_bytes() and key.encode() not in path.read_bytes()
    (logged,) = read_log(tmp_path, LogFaults())
    first, second = (message["content"] for message in logged.record["messages"])
    placeholder = second[1:-1]
    assert placeholder.startswith("<EMAIL_") and first.startswith(f"I am {placeholder}, my key is <")
    assert logged.record["tools"] == [{"name": "f", "arguments": {"to": [placeholder]}}]
    other = made(tmp_path / "other")
    other.append({"n": 0}, text=mail)
    (logged,) = read_log(tmp_path / "other", LogFaults())
    assert logged.record["text"] != placeholder, "another process has another salt"


def test_any_text_comes_back(tmp_path: Path) -> None:
    log = made(tmp_path)
    said = '\ud83d half a pair, \u2028, \0, "check":"0123456789abcdef"}\n, \N{SHEEP}'
    log.append({"n": 0}, text=said)
    (logged,) = read_log(tmp_path, LogFaults())
    assert logged.record["text"] == said


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_counted_and_the_others_are_read(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read(tmp_path) == ([0, 1], LogFaults(cut=1))


def test_lines_that_were_changed_moved_or_removed_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "log", 6)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line.replace(b'"n":2', b'"n":7') for line in lines))
    assert read(path.parent) == ([0, 1, 3, 4, 5], LogFaults(changed=1))
    path.write_bytes(b"".join(lines[:2] + lines[4:]))
    assert read(path.parent) == ([0, 3, 4, 5], LogFaults(missing=2))
    other = written(tmp_path / "other", 1)
    path.write_bytes(b"".join(lines) + other.read_bytes().splitlines(keepends=True)[1])
    assert read(path.parent) == ([0, 1, 2, 3, 4, 5], LogFaults(changed=1))
    path.write_bytes(b"".join(lines[:3]) + b"no JSON\n" + b"\xff\xfe\n" + b"".join(lines[4:]))
    found, faults = read(path.parent)
    assert found == [0, 1, 3, 4, 5] and faults.changed == 2
    assert str(LogFaults(changed=1, missing=2)) == "1 changed, 2 missing"


def test_a_check_sum_is_that_of_the_line_and_of_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    line = path.read_bytes().splitlines()[1]
    body, _, rest = line.rpartition(b',"check":"')
    assert rest == check_sum(path.name, body) + b'"}'
    assert check_sum("another" + SUFFIX, body) != check_sum(path.name, body)


def test_old_files_and_those_that_exceed_the_room_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_log, "_FILE_BYTES", 2000)
    old = written(tmp_path, 2)
    os.utime(old, (time.time() - 3 * 86400,) * 2)
    log = made(tmp_path, max_bytes=10_000, max_days=2)
    assert not old.exists()
    for number in range(400):
        log.append({"n": number})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000 + 200
    found, faults = read(tmp_path)
    assert found == list(range(found[0], 400)) and 50 < len(found) < 200 and faults == LogFaults()


def test_a_full_disk_costs_the_records_of_that_time_alone(tmp_path: Path) -> None:
    log = made(tmp_path)
    log.append({"n": 0})

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            if len(data) > 20:
                return int(self._file.write(data[:20]))
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    file = log._file
    log._file = Full(file)
    with pytest.raises(StorageError, match="space"):
        log.append({"n": 1})
    log.append({"n": 2})
    found, faults = read(tmp_path)
    assert found == [0, 2] and faults == LogFaults(cut=1)


def test_a_file_that_the_server_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_log, "_FILE_BYTES", 1000)
    log = made(tmp_path)
    for number in range(60):
        log.append({"n": number})
    faults = LogFaults()
    reading = read_log(tmp_path, faults)
    first = next(reading).record["n"]
    path = sorted(tmp_path.iterdir())[1]
    lost = [json.loads(line)["n"] for line in path.read_text().splitlines()[1:]]
    path.unlink()
    assert [first, *(logged.record["n"] for logged in reading)] == [n for n in range(60) if n not in lost]
    assert lost and faults == LogFaults()


@pytest.mark.parametrize("content", [b"[1", b'{"number":"1"', b'{"a":' + b"[" * 5000, b"\xff", b"{"])
def test_a_line_with_a_right_check_sum_and_no_record_is_counted(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, 2)
    with path.open("ab") as file:
        file.write(content + b',"check":"' + check_sum(path.name, content) + b'"}\n')
    assert read(tmp_path) == ([0, 1], LogFaults(changed=1))


def test_what_is_no_log_or_a_newer_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no log"):
        list(read_log(tmp_path, LogFaults()))
    path = written(tmp_path / "log", 0)
    body = b'{"number":0,"format":99'
    path.write_bytes(body + b',"check":"' + check_sum(path.name, body) + b'"}\n')
    with pytest.raises(DataError, match="format 99"):
        list(read_log(path.parent, LogFaults()))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        made(tmp_path / "file")
