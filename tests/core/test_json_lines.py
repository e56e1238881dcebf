"""JSON lines: objects with their line numbers, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sheepop.core.errors import DataError
from sheepop.core.json_lines import BadLine, json_rows, parsed_lines


def test_objects_come_with_the_numbers_of_their_lines_and_blank_lines_count() -> None:
    lines = [b'\xef\xbb\xbf{"a": 1}\n', b"\n", b'  {"a": 2}\r\n', b"[1]\n", b'{"a": NaN}\n', b"\xff\n"]
    found = dict(parsed_lines(lines))
    assert (found[1], found[3], found[4]) == ({"a": 1}, {"a": 2}, BadLine("not a JSON object"))
    assert found.keys() == {1, 3, 4, 5, 6}
    for number in (5, 6):
        bad = found[number]
        assert isinstance(bad, BadLine)
        assert bad.reason.startswith("not valid JSON (")


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    rows = json_rows(path)
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: not valid JSON \("):
        next(rows)
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: no such file"):
        next(json_rows(tmp_path / "none.jsonl"))
