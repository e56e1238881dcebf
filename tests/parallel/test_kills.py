"""A run that is killed or stopped over and over, and goes on with every strategy in turn."""

from __future__ import annotations

import random
import signal
from itertools import cycle, islice
from pathlib import Path

import pytest

from sheepop.checkpoint import RunDirectory

from .conftest import Together, rows
from .strategies import STRATEGIES, Strategy
from .test_runs_of_ranks import await_step, require_same_course

# Strategies that have one network and the same data go on from each other's checkpoints.
_GROUPS = [
    [each for each in STRATEGIES.values() if each.needs == list(needs)]
    for needs in dict.fromkeys(tuple(each.needs) for each in STRATEGIES.values())
]
_SETTINGS = ["training.max_steps=64", "training.checkpoint_interval=2", "model.num_layers=4", "model.num_heads=4"]


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("strategies", _GROUPS, ids=lambda group: f"{len(group)} strategies")
def test_a_run_that_is_ended_in_every_layout_takes_the_same_steps(
    together: Together, tmp_path: Path, strategies: list[Strategy], number: signal.Signals
) -> None:
    chosen, run, whole = random.Random(7), tmp_path / "run", tmp_path / "whole"
    assert together.alone(together.options(whole, *_SETTINGS, *strategies[0].needs)).code == 0
    for strategy in islice(cycle(strategies), 20):
        options = [*together.options(run, *_SETTINGS, *strategy.options), "--resume", "auto"]
        ranks = together.start(strategy.ranks, options)
        latest = RunDirectory(run).pointer("latest") or 0
        await_step(ranks, run, min(latest + chosen.randrange(1, 4), 62))
        chosen.choice(ranks).send_signal(number)
        ends = [rank.wait() for rank in ranks]
        if number == signal.SIGKILL:
            assert all(end.code != 0 for end in ends), (strategy, ends)
        else:
            assert [end.code for end in ends] == [128 + number] * strategy.ranks, (strategy, ends)
            assert RunDirectory.open(run).pointer("latest") == max(row["step"] for row in rows(run))
    options = [*together.options(run, *_SETTINGS, *strategies[0].options), "--resume", "auto"]
    ends = together.run(strategies[0].ranks, options)
    assert [end.code for end in ends] == [0] * len(ends), ends
    require_same_course(whole, run)
