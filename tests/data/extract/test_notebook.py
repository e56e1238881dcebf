from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sheepop.data.extract.interface import Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

V4 = nbformat.v4
KERNEL = {"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}, "title": "Counting sheep"}


def sample(*cells: Any) -> bytes:
    outputs = [
        V4.new_output("stream", text="3\n4\n"),
        V4.new_output("display_data", data={"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}),
        V4.new_output("execute_result", data={"text/html": "<b>5</b>", "text/plain": "5"}),
        V4.new_output("error", ename="E", evalue="v", traceback=["\x1b[0;31mE\x1b[0m: v", "line 2"]),
    ]
    cells = cells or (
        V4.new_markdown_cell("# Sheep\n\nWe count them, *all* of them, and it takes a long time."),
        V4.new_code_cell("x <- 3\n\nprint(x)\n", outputs=outputs),
        V4.new_code_cell(""),
        V4.new_raw_cell("raw text"),
    )
    return nbformat.writes(V4.new_notebook(cells=list(cells), metadata=KERNEL)).encode()


def document(items: list[Extracted | Refused]) -> Extracted:
    (item,) = items
    assert isinstance(item, Extracted), item
    return item


def refusal(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Refused), item
    return item.reason


def test_a_notebook_of_nbformat_becomes_its_prose_and_its_code(read_as: ReadAs) -> None:
    item = document(read_as("notebook", sample()))
    assert item.text == (
        "# Sheep\n\nWe count them, *all* of them, and it takes a long time."
        "\n\n```r\nx <- 3\n\nprint(x)\n```\n\nraw text"
    )
    assert [name for _, name in item.marks] == ["cell 1", "cell 2", "cell 4"]
    assert [item.text[begin:][:4] for begin, _ in item.marks] == ["# Sh", "```r", "raw "]
    assert (item.kind, item.language) == ("prose", "")
    assert dict(item.metadata) == {"title": "Counting sheep", "kernel_language": "r"}


def test_outputs_that_are_text_come_whole_when_they_are_asked_for(read_as: ReadAs) -> None:
    item = document(read_as("notebook", sample(), notebook_outputs=True))
    code = "```r\nx <- 3\n\nprint(x)\n```"
    outputs = ["3\n4", "<Figure>", "5", "E: v\nline 2"]
    assert "\n\n".join([code, *(f"```output\n{output}\n```" for output in outputs)]) in item.text
    long = V4.new_output("stream", text="sheep\n" * 50_000)
    item = document(read_as("notebook", sample(V4.new_code_cell("f()", outputs=[long])), notebook_outputs=True))
    assert item.text.count("sheep\n") == 50_000


def test_a_notebook_that_is_mostly_code_is_code(read_as: ReadAs) -> None:
    cell = V4.new_code_cell("x <- 1\n" * 20 + "print('```')")
    item = document(read_as("notebook", sample(V4.new_markdown_cell("Short."), cell)))
    assert (item.kind, item.language) == ("code", "r")
    assert item.text.startswith("Short.\n\n````r\nx <- 1\n")


def test_a_notebook_of_pandoc_is_read(read_as: ReadAs, tmp_path: Path) -> None:
    pandoc = shutil.which("pandoc")
    if pandoc is None:
        pytest.skip("pandoc is not installed")
    target = tmp_path / "made.ipynb"
    source = "# Sheep\n\nThey eat.\n\n``` {.code .python}\nx = 1\n```\n"
    subprocess.run([pandoc, "-f", "markdown", "-o", target], input=source.encode(), check=True)
    assert document(read_as("notebook", target.read_bytes())).text.startswith("# Sheep\n\nThey eat.")


def test_older_formats_are_read(read_as: ReadAs) -> None:
    cells = [
        {"cell_type": "heading", "level": 2, "source": ["Sheep"], "metadata": {}},
        {"cell_type": "markdown", "source": ["They eat."], "metadata": {}},
        {"cell_type": "code", "input": ["x = 1\n", "y = 2"], "language": "python", "outputs": [], "collapsed": False},
    ]
    three = {"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": "x"}, "worksheets": [{"cells": cells}]}
    item = document(read_as("notebook", json.dumps(three).encode()))
    assert item.text == "## Sheep\n\nThey eat.\n\n```python\nx = 1\ny = 2\n```"
    two = {"nbformat": 2, "metadata": {"name": "x"}, "worksheets": [{"cells": cells[1:]}]}
    assert document(read_as("notebook", json.dumps(two).encode())).text.startswith("They eat.")
    minor = json.loads(sample())
    minor["nbformat_minor"] = 99
    assert document(read_as("notebook", json.dumps(minor).encode())).text.startswith("# Sheep")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "damaged"),
        (b"", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"\x00\x01\x02", "binary"),
        (b"[]", "invalid"),
        (b"{}", "invalid"),
        (b'{"nbformat": "4"}', "invalid"),
        (b'{"nbformat": 4, "cells": 3}', "invalid"),
        (b'{"nbformat": 3, "worksheets": [{}]}', "invalid"),
        (b'{"nbformat": 5, "cells": []}', "unsupported"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}', "empty"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(read_as: ReadAs, data: bytes, reason: str) -> None:
    assert refusal(read_as("notebook", data)) == reason


def test_a_newer_format_is_named(read_as: ReadAs) -> None:
    (refused,) = read_as("notebook", b'{"nbformat": 7}')
    assert refused == Refused("", "unsupported", "notebook format 7; formats 1 to 4 are read")


def test_damaged_notebooks_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged(sample()):
        items = read_as("notebook", copy)
        assert items
        assert all(isinstance(item, Refused) or item.text.strip() for item in items)


def test_notebooks_with_values_of_the_wrong_kind_are_read_or_refused(read_as: ReadAs) -> None:
    whole = json.loads(sample())
    for wrong in (None, 3, "x", [], {}, [3], {"a": 1}):
        for path in (["metadata"], ["cells"], ["cells", 0], ["cells", 1, "source"], ["cells", 1, "outputs"]):
            copy = json.loads(json.dumps(whole))
            inner = copy
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = wrong
            assert read_as("notebook", json.dumps(copy).encode(), notebook_outputs=True)
