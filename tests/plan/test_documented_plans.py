"""The plans for machines that are not here, as docs/planning.md prints them, are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sheepop.core.budget import Budget
from sheepop.jobs.plan import plan_a_run
from sheepop.jobs.run.request import RunRequest
from sheepop.plan.machine import find_machine

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SETTINGS_AND_TABLE = re.compile(r"```yaml\n(model.*?)```\n\n(\|.*?\n)\n", re.DOTALL)
PLANS = dict(zip(("h100x1024", "h100x8"), SETTINGS_AND_TABLE.findall(PAGE), strict=True))


@pytest.mark.parametrize("machine", PLANS)
def test_the_plans_on_the_page_are_those_of_the_code(machine: str):
    """With the layout of each row of the table, as somebody would ask for it who reads the page.

    The peak differs by up to 4 percent with what was counted before in the process.
    """
    settings, table = PLANS[machine]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == 3
    middles = []
    for keys, held, peak, sent, step in rows:
        parallel = {name: int(value) for name, value in (each.split("=") for each in keys.split())}
        given = {**yaml.safe_load(settings), "parallel": parallel}
        found = plan_a_run(RunRequest(given), machine=find_machine(machine), budget=Budget.of("24h"))
        plan, time = found.layouts[0].plan, found.layouts[0].seconds
        assert f"{sum(plan.held.values()) / 1e9:.1f} GB" == held
        assert f"{sum(plan.sent.values()) / 1e9:.1f} GB" == sent
        assert f"{time.middle:.1f} s ({time.low:.1f} to {time.high:.1f})" == step
        assert plan.peak / 1e9 == pytest.approx(float(peak.removesuffix(" GB")), rel=0.05)
        middles.append(time.middle)
        if keys == "zero=3":
            steps = found.to_dict()["budget"]["steps"]
            assert f"{steps[1]:,} steps ({steps[0]:,} to {steps[2]:,})" in " ".join(PAGE.split())
    assert middles == sorted(middles)
