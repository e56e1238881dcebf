"""Files of JSON lines that grow: appended, cut back on resume, readable after a kill."""

import math
import resource
from pathlib import Path

import pytest

from sheepop.core.errors import CheckpointError, StorageError
from sheepop.core.json_lines import JsonLines, read_json_lines


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 2.5, "text": "naïve\n"})
    log.append({"step": 2, "loss": math.nan, "loads": [0.5, (math.inf, {"of": -math.inf})]})
    log.close()
    rows, num_unreadable = read_json_lines(tmp_path / "metrics.jsonl")
    assert num_unreadable == 0
    assert rows == [
        {"step": 1, "loss": 2.5, "text": "naïve\n"},
        {"step": 2, "loss": None, "loads": [0.5, [None, {"of": None}]]},
    ]


def test_a_log_is_on_the_disk_by_its_name_before_its_content_is(tmp_path: Path, disk_order: list[str]) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    log.sync()
    log.close()
    assert disk_order == [tmp_path.name, "metrics.jsonl"]


def test_reopening_at_a_length_drops_what_was_written_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    log.append({"step": 1})
    log.sync()
    length = log.length
    log.append({"step": 2})
    log.close()
    log = JsonLines(path, length)
    log.append({"step": 3})
    log.close()
    assert [row["step"] for row in read_json_lines(path)[0]] == [1, 3]


def test_the_length_is_true_before_anything_is_written(tmp_path: Path) -> None:
    """A run that is cut back and stopped again before its next row must not record the length of before."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    log = JsonLines(path, 12)
    log.sync()
    length = log.length
    log.close()
    assert length == path.stat().st_size == 12


def test_a_file_shorter_than_the_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"has 3 bytes.*had 100"):
        JsonLines(path, 100)
    assert path.read_text() == "{}\n"


def test_lines_that_hold_no_row_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n\n{"step": 2, "lo')
    assert read_json_lines(path) == ([{"step": 1}], 2)
    assert read_json_lines(tmp_path / "absent.jsonl") == ([], 0)


def test_what_a_full_disk_refuses_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    log.append({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(StorageError, match=r"metrics\.jsonl: the file would be larger"):
            log.append({"step": 2, "text": "long" * 10})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == '{"step": 1}\n{"step":'
