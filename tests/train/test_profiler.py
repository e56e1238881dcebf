"""A profile of some steps: what is recorded, and that it changes none of a run's numbers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.json_lines import read_json_lines
from sheepop.train import Trainer
from sheepop.train.profiler import StepProfiler

MakeTrainer = Callable[..., Trainer]


def profiler(directory: Path, num_steps: int, steps_to_go: int, said: io.StringIO | None = None) -> StepProfiler:
    console = Console(file=said or io.StringIO())
    return StepProfiler(directory, num_steps, steps_to_go=steps_to_go, device="cpu", console=console)


def recorded_steps(directory: Path) -> list[str]:
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    return sorted(
        {e["name"] for e in events if re.fullmatch(r"step \d+", str(e.get("name")))}, key=lambda n: int(n[5:])
    )


@pytest.mark.parametrize(
    ("num_steps", "steps_to_go", "expected"),
    [
        (2, 10, ["step 104", "step 105"]),  # three steps warm up
        (4, 5, ["step 102", "step 103", "step 104", "step 105"]),  # one step is left for that
        (9, 2, ["step 101", "step 102"]),
    ],
)
def test_the_steps_after_the_warm_up_are_recorded(
    tmp_path: Path, num_steps: int, steps_to_go: int, expected: list[str]
) -> None:
    around = profiler(tmp_path / "profile", num_steps, steps_to_go)
    for step in range(100, 100 + steps_to_go):
        with around(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    around.close()
    assert recorded_steps(tmp_path / "profile") == expected


def test_the_table_counts_the_operations(tmp_path: Path) -> None:
    said = io.StringIO()
    around = profiler(tmp_path / "profile", 2, 5, said)
    for step in range(5):
        with around(step):
            for _ in range(7):
                torch.ones(16, 4) @ torch.ones(4, 3)
    around.close()
    lines = (tmp_path / "profile" / "operations.txt").read_text().splitlines()
    assert lines[0] == "The costliest operations of 2 steps, by their own time"
    (row,) = [line for line in lines if re.match(r"\s+aten::mm ", line) and "[[" not in line]
    assert row.split()[-1] == "14"
    (by_shape,) = [line for line in lines if re.match(r"\s+aten::mm ", line) and "[[" in line]
    assert "[[16, 4], [4, 3]]" in by_shape
    assert said.getvalue().startswith(f"Profile: {tmp_path / 'profile' / 'operations.txt'}")


def test_a_profile_changes_no_number(make_trainer: MakeTrainer) -> None:
    plain, watched = make_trainer("plain"), make_trainer("watched")
    around = profiler(watched.checkpointer.run.path / "profile", 4, 12)
    watched.around_step = around
    for trainer in (plain, watched):
        trainer.run()
    around.close()
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, watched.model.get_parameter(name))
    rows = [
        [(row["step"], row["split"], row["loss"]) for row in read_json_lines(t.checkpointer.run.metrics_file)[0]]
        for t in (plain, watched)
    ]
    assert rows[0] == rows[1]
    assert recorded_steps(watched.checkpointer.run.path / "profile") == [f"step {n}" for n in (4, 5, 6, 7)]


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    said = io.StringIO()
    around = profiler(tmp_path / "profile", 1, 1, said)
    with around(0):
        pass
    around.close()
    assert "Warning: The profile was not written: OutputError" in said.getvalue()
