"""How a run keeps to its minutes: where in its schedule it stands, and what it does when steps take another time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.train import Trainer, TrainingConfig
from sheepop.train.agenda import EVALUATE, SAMPLE, SAVE, VALIDATE, Agenda
from sheepop.train.journal import Journal
from sheepop.train.schedule import Deadline, Pace

from .runs import assert_same_run, timeless

MakeTrainer = Callable[..., Trainer]


def test_what_is_left_of_the_plan_is_spread_over_the_steps_that_are_left() -> None:
    pace = Pace(100).revised(50, 80)  # 50 planned steps in 30
    assert [pace.place(step) for step in (0, 20, 50, 53, 65, 80)] == pytest.approx([0, 20, 50, 55, 75, 100])
    pace = pace.revised(65, 115)  # the 25 that are left, in 50
    assert [pace.place(step) for step in (50, 65, 90, 115)] == pytest.approx([50, 75, 87.5, 100])
    assert pace.total_steps == 115


@given(st.integers(1, 10**6), st.data())
def test_a_pace_goes_through_the_whole_plan_and_never_back(planned: int, data: st.DataObject) -> None:
    assert Pace(planned).place(planned // 2) == planned // 2
    pace, step = Pace(planned), 0
    for _ in range(data.draw(st.integers(0, 5))):
        step = data.draw(st.integers(step + 1, step + 1000))
        if step >= pace.total_steps:
            break
        pace = pace.revised(step, data.draw(st.integers(step + 1, step + 2000)))
    total = pace.total_steps
    places = [pace.place(at) for at in sorted({0, min(step, total), (min(step, total) + total) // 2, total})]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] == pytest.approx(planned)


def seconds_taken(
    budget: float, planned: int, seconds_of: Callable[[int], float], pause: float = 0.0, most: int | None = None
) -> tuple[float, Pace]:
    """Until a run has ended whose steps take `seconds_of`, and every tenth of the plan `pause` more."""
    pace, step, seconds = Pace(planned), 0, 0.0
    deadline = Deadline(budget, most, record=lambda pace: None)
    while step < pace.total_steps:
        seconds += seconds_of(step)
        step += 1
        if step % max(1, planned // 10) == 0 or step == pace.total_steps:
            seconds += pause
        if step < pace.total_steps:
            pace = deadline.revise(pace, step, seconds, pause) or pace
    return seconds, pace


def test_a_plan_that_fits_is_left_alone() -> None:
    assert seconds_taken(300, 1000, lambda step: 0.3) == (pytest.approx(300), Pace(1000))


@pytest.mark.parametrize("pause", [0.0, 4.0])
@pytest.mark.parametrize("factor", [0.4, 0.8, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("since", [0, 300, 700])
def test_a_run_ends_in_time_when_its_steps_take_another_time_than_was_measured(
    since: int, factor: float, pause: float
) -> None:
    """Whatever the machine does from some step on: at most 1.5 percent over the time, and 1.5 under."""
    budget, planned = 300.0 + 10 * pause, 1000
    seconds, pace = seconds_taken(budget, planned, lambda step: 0.3 * (factor if step >= since else 1), pause)
    assert 0.985 * budget <= seconds <= 1.015 * budget
    assert len(pace.revisions) <= 13


@given(st.lists(st.floats(0.5, 4.0), min_size=5, max_size=5), st.integers(200, 3000))
def test_a_machine_that_changes_its_mind_does_not_make_a_run_overrun(speeds: list[float], planned: int) -> None:
    seconds, _ = seconds_taken(100, planned, lambda step: 100 / planned * speeds[min(4, 5 * step // planned)])
    assert seconds <= 105 + 2 * max(speeds) * 100 / planned


def test_other_budgets_still_hold() -> None:
    seconds, pace = seconds_taken(300, 1000, lambda step: 0.1, most=1500)
    assert pace.total_steps == 1500
    assert seconds == pytest.approx(150)


class Clock:
    """Seconds that pass with steps alone, three times as many from the tenth step on."""

    now = 0.0

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        yield
        self.now += 3.0 if step >= 10 else 1.0


@pytest.fixture
def timed(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trainer, list[Pace]]]:
    """A run of 40 planned steps that has 40 seconds by such a clock, and what it writes down of its pace."""
    clock = Clock()
    monkeypatch.setattr(Journal, "seconds", property(lambda journal: clock.now))

    def make(name: str, **settings: object) -> tuple[Trainer, list[Pace]]:
        trainer, written = make_trainer(name, **{"max_steps": 40, "eval_interval": 7, **settings}), []
        trainer.around_step = clock.around_step
        trainer.deadline = Deadline(40.0, None, written.append)
        return trainer, written

    return make


def test_the_schedule_is_gone_through_whole_and_a_run_that_is_told_the_pace_repeats_it(
    timed: Callable[..., tuple[Trainer, list[Pace]]], make_trainer: MakeTrainer
) -> None:
    trainer, written = timed("timed")
    trainer.run()
    pace = written[-1]
    rows = [row for row in timeless(trainer.checkpointer.run.metrics_file) if row["split"] == "train"]
    assert 18 <= len(rows) == pace.total_steps <= 22  # 10 in 10 seconds, then one in three
    rates = [row["learning_rate"] for row in rows]
    assert rates == [trainer.schedule(pace.place(step)) for step in range(len(rows))]
    assert rates[-1] < 0.02 * max(rates)
    settings = TrainingConfig(max_steps=40).at_pace(pace)
    repeated = make_trainer("repeated", max_steps=settings.max_steps, pace=settings.pace, eval_interval=7)
    repeated.run()
    assert_same_run(trainer, repeated)
    assert repeated.agenda.pace == pace


def due(agenda: Agenda, name: str) -> list[int]:
    return [step for step in range(1, agenda.total_steps + 1) if name in agenda.after(step)]


def test_derived_intervals_follow_the_plan_and_given_ones_are_steps() -> None:
    """A plan of 10 steps that turn out to be 100, and one of 100 that turn out to be 20."""
    derived = {"sample_interval": 2, "checkpoint_interval": 1}
    settings = TrainingConfig(max_steps=10, warmup_steps=0, micro_batch_size=1, precision="fp32", eval_interval=30)
    settings = settings.replace(**derived, paced_intervals=tuple(derived)).at_pace(Pace(10).revised(1, 91))
    agenda = Agenda.of(settings, settings.resolved(), validates=True, evaluates=True)
    assert due(agenda, SAMPLE) == [11, 31, 51, 71, 91]  # planned steps 2, 4, ..., each of which takes ten
    assert due(agenda, SAVE) == [1, *range(11, 92, 10)]
    assert due(agenda, VALIDATE) == due(agenda, EVALUATE) == [30, 60, 90, 91]
    assert agenda.milestones == {1, 21, 41}  # places 1, 3 and 5

    settings = settings.replace(pace=(), max_steps=100, eval_interval=10, sample_interval=20, checkpoint_interval=10)
    settings = settings.replace(paced_intervals=("eval_interval", "sample_interval", "checkpoint_interval"))
    settings = settings.at_pace(Pace(100).revised(10, 19))  # ten planned steps in one
    agenda = Agenda.of(settings, settings.resolved(), validates=True, evaluates=True)
    assert due(agenda, VALIDATE) == due(agenda, EVALUATE) == list(range(10, 20))
    assert due(agenda, SAMPLE) == [11, 13, 15, 17, 19]
    assert agenda.milestones == {10, 12, 14} <= set(due(agenda, SAVE))
    bare = settings.replace(keep_milestones=False, checkpoint_interval=1000)
    agenda = Agenda.of(bare, bare.resolved(), validates=True)
    assert (agenda.milestones, due(agenda, SAVE)) == (set(), [19])


@given(st.integers(1, 400), st.integers(1, 50), st.lists(st.integers(1, 300), max_size=4))
def test_as_much_is_due_as_was_planned_however_the_pace_changes(planned: int, interval: int, more: list[int]) -> None:
    settings = TrainingConfig(max_steps=planned, warmup_steps=0, micro_batch_size=1, precision="fp32", eval_interval=9)
    settings = settings.replace(sample_interval=interval, checkpoint_interval=9, paced_intervals=("sample_interval",))
    pace, step = Pace(planned), 0
    for steps in more:
        step += steps
        if step >= pace.total_steps:
            break
        pace = pace.revised(step, step + steps)
    settings = settings.at_pace(pace)
    found = due(Agenda.of(settings, settings.resolved(), validates=False), SAMPLE)
    assert len(found) <= math.ceil(planned / interval)
    assert found[-1] == pace.total_steps


def test_a_changed_pace_is_told_in_one_line(timed: Callable[..., tuple[Trainer, list[Pace]]]) -> None:
    trainer, _ = timed("timed")
    said: list[str] = []
    trainer.console = cast(Console, SimpleNamespace(info=said.append, progress=Console.silent().progress))
    trainer.run()
    assert [line for line in said if "planned" in line] == [f"Slower than planned: {trainer.state.step} steps."]


def test_a_run_that_goes_back_is_timed_anew_from_there() -> None:
    deadline, pace = Deadline(100.0, None, record=lambda pace: None), Pace(100)
    for step in range(1, 61):
        assert deadline.revise(pace, step, float(step), 0.0) is None
    assert deadline.revise(pace, 40, 61.0, 0.0) is None
    found = [deadline.revise(pace, step, 61.0 + step - 40, 0.0) for step in range(41, 46)]
    (revised,) = [one for one in found if one is not None][:1]
    assert 78 <= revised.total_steps <= 80  # 39 seconds are left at step 40, and a step takes one


@pytest.mark.parametrize(
    ("step_seconds", "most_after", "total"),
    [
        (2.0, 90.0, 45),  # the score takes 20 seconds instead of 10, so (100 - 10) / 2 steps fit
        (4.0, 25.0, 21),  # 40 seconds, of which 25 are allowed: (100 - 15) / 4
        (0.5, 90.0, 200),  # a faster machine keeps the time of the score in reserve
    ],
)
def test_a_slower_machine_leaves_more_time_for_the_score(step_seconds: float, most_after: float, total: int) -> None:
    deadline, pace = Deadline(100.0, None, lambda pace: None, after=10.0, most_after=most_after), Pace(100)
    revised = None
    for step in range(1, 12):
        revised = revised or deadline.revise(pace, step, step * step_seconds, 0.0)
    assert revised is not None and revised.total_steps == total


def test_what_was_decided_before_a_kill_is_not_decided_anew() -> None:
    pace = Pace(1000).revised(500, 800)
    deadline = Deadline(300.0, None, record=lambda pace: None)
    for step in range(400, 501, 10):
        assert deadline.revise(pace, step, 250 + step / 100, 0.0) is None
    assert deadline.revise(pace, 510, 280.0, 0.0) is not None


@pytest.mark.parametrize(
    ("pace", "words"),
    [
        ([[0, 100], [50, 80]], "belongs to a run of 80 steps, but max_steps is 90"),
        ([[1, 90]], "must begin with 0 and increase"),
        ([[0, 100], [50, 95], [50, 90]], "must begin with 0 and increase"),
        ([[0, 100], [95, 90]], "more than the steps taken by then"),
    ],
)
def test_a_pace_that_contradicts_itself_is_refused(pace: list[list[int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingConfig(max_steps=90, pace=pace)
