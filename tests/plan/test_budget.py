"""Budgets and machines as people write them, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sheepop.core.budget import Budget
from sheepop.core.errors import ConfigError, UsageError
from sheepop.plan.machine import find_machine
from sheepop.plan.timing import Course, Interval, mean_interval

MACHINE = "devices: 2\nmemory_gb: 10\nteraflops: 5\nlink_gb_per_second: 1\nnetwork_gb_per_second: 1\n"


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("24h", "seconds", 86_400),
        ("1.5 min", "seconds", 90),
        ("2d", "seconds", 172_800),
        ("1e18flops", "flops", 1e18),
        ("50USD", "usd", 50),
    ],
)
def test_a_budget_is_a_number_with_a_unit(text: str, kind: str, amount: float) -> None:
    assert (Budget.of(text).kind, Budget.of(text).amount) == (kind, amount)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0h", "above 0"),
        ("1e-400usd", "above 0"),
        ("1e999flops", "finite"),
        ("24", "is not a budget"),
        ("", "is not a budget"),
        ("-3h", "is not a budget"),
        ("1e18flop", "Did you mean flops?"),
        ("50dollars", "is not a budget"),
        ("3 mins", "Did you mean min?"),
        ("nanh", "is not a budget"),
    ],
)
def test_a_budget_of_nothing_or_of_an_unknown_unit_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        Budget.of(text)


def test_usual_machines_have_the_figures_of_their_data_sheets() -> None:
    machine = find_machine("h100x8")
    assert machine is not None
    assert (machine.devices, machine.memory_gb, machine.teraflops, machine.usd_per_hour) == (8, 80, 989.4, 20.0)
    assert find_machine("this") is None


@pytest.mark.parametrize("text", ["h100", "h100x0", "h100x-1", "v100x8", "h100x9999999", "", "thiss"])
def test_an_unknown_machine_is_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(UsageError, match="Known are this, a100xN, h100xN, h200xN"):
        find_machine(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("devices: 0\n", "devices"),
        ("memory_gb: .nan\n", "memory_gb"),
        ("teraflops: -1\n", "teraflops"),
        ("gpus: 3\n", "gpus"),
        ("usd_per_hour: free\n", "usd_per_hour"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused_by_key(tmp_path: Path, change: str, said: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(MACHINE)
    found = find_machine(str(file))
    assert found is not None
    assert found.devices == 2
    key = change.partition(":")[0]
    file.write_text("".join(line + "\n" for line in MACHINE.splitlines() if not line.startswith(key)) + change)
    with pytest.raises(ConfigError, match=said):
        find_machine(str(file))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        find_machine(str(tmp_path / "nowhere.yaml"))


def test_the_interval_of_equal_times_is_the_time() -> None:
    found = mean_interval([0.25] * 8)
    assert (found.low, found.middle, found.high) == pytest.approx((0.95 * 0.25, 0.25, 1.05 * 0.25))


def test_the_interval_covers_a_drift_between_the_halves() -> None:
    found = mean_interval([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    assert (found.low, found.middle, found.high) == pytest.approx((0.95, 2.0, 3.15))


def test_the_interval_of_a_normal_mean_is_two_standard_errors() -> None:
    from statistics import NormalDist

    times = [NormalDist(10, 1).inv_cdf((number + 0.5) / 400) for number in range(400)]
    times = times[::2] + times[1::2][::-1]  # both halves have the same mean
    found = mean_interval(times)
    assert found.high / 1.05 - found.middle == pytest.approx(1.96 / 20, rel=0.25)


def test_a_budget_holds_the_steps_that_fit_after_all_else() -> None:
    course = Course(100, Interval(1.0, 2.0, 4.0), {"score": 15, "report": 5}, tokens=10, flops=5, usd_per_hour=36)
    assert (course.seconds.low, course.seconds.middle, course.seconds.high) == (115, 220, 425)
    assert course.usd is not None
    assert course.usd.middle == pytest.approx(2.2)
    assert course.steps_within(Budget.of("1min")) == (8, 20, 45)
    assert course.steps_within(Budget.of("101flops")) == (20, 20, 20)
    assert course.steps_within(Budget.of("1.2usd")) == (23, 50, 105)  # 120 seconds
    assert course.steps_within(Budget.of("5s")) == (0, 0, 0)
    busy = replace(course, quiet=0.5)
    assert (busy.seconds.low, busy.seconds.middle, busy.seconds.high) == (57.5, 220, 425)
    assert busy.steps_within(Budget.of("1min")) == (8, 20, 105)
