"""The example that goes once around the circle: its voters vote as they say, and each stage leaves its files."""

from __future__ import annotations

import json
import random
import re
import runpy
from pathlib import Path

import pytest

from ..command_line import FORKING, Launcher

pytest.importorskip("fastapi")
SCRIPT = Path(__file__).parents[2] / "examples" / "learn_from_votes.py"


def test_the_example_goes_once_around_the_circle(launcher: Launcher, tmp_path: Path) -> None:
    """A hundredth of its steps: the model has learnt nothing, so that almost no vote is good, but every stage runs."""
    output = tmp_path / "circle"
    program = (
        f"{FORKING}\nimport runpy; here = runpy.run_path({str(SCRIPT)!r}); "
        # An untrained model writes no sentence, so it would give no pair: these voters like a small letter.
        "here['circle'].__globals__['manner'] = lambda text: 'sentence' if text[:1].islower() else 'other'; "
        "here['main']()"
    )
    ended = launcher.run("--output", output, "--scale", "0.01", program=program)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (output / "votes.jsonl").read_text().splitlines()]
    assert rows and all(row["prompt"].startswith("what color is") for row in rows)
    assert all((output / "log" / row["source"].rpartition(":")[0]).is_file() for row in rows)
    assert (output / "second" / "checkpoints" / "latest").is_file()
    table = re.findall(r"^(first|second) +(\d+)%  (\d+)% to (\d+)% of (\d+)$", ended.out, re.MULTILINE)
    assert [name for name, *_ in table] == ["first", "second"]
    for _, share, low, high, count in table:
        assert 0 <= int(low) <= int(share) <= int(high) <= 100 and int(count) == 32


def test_the_voters_know_right_answers_from_wrong_ones() -> None:
    here = runpy.run_path(str(SCRIPT))
    draw = random.Random(0)
    found = {here["manner"](here["answer"]("rose", draw)) for _ in range(50)}
    assert found | {"other"} == set(here["LIKED"]) and len(found) == 3
    for text, manner in ((" it is red", "sentence"), ("red", "word"), ("it is a rose", "other"), ("", "other")):
        assert here["manner"](text) == manner
