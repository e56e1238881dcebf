"""Trouble in the numbers of one rank: all of them pass over the batch, or go back, as one process does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory

from ..command_line import Ended
from ..faults.conftest import DISTURBED, TIMING
from .conftest import Together, rows
from .strategies import STRATEGIES
from .test_runs_of_ranks import require_same_course

_NO_NUMBER, _SPIKE = 6, 12  # the calls, one a step, at which gradients are disturbed, before their norm is taken
_DISTURBS = f"""
global count
count = {_SPIKE}
gradients = [each.grad for each in arguments[0].model.parameters() if each.grad is not None]
for gradient in gradients if calls == {_SPIKE} else ():
    gradient.mul_(1e4)
if calls == {_NO_NUMBER} and int(os.environ.get("RANK", "0")) + 1 == int(os.environ.get("WORLD_SIZE", "1")):
    gradients[0].view(-1)[0] = float("nan")
"""
_SETTINGS = ["training.max_steps=14", "training.trouble.window=16", "model.num_layers=4", "model.num_heads=4"]


def _same(run: Path, other: Path) -> None:
    """The same steps, and the same trouble in them; only rounding may differ in the words."""
    mine, others = ([row for row in rows(each) if row["split"] == "trouble"] for each in (run, other))
    assert len(mine) == 2

    def known(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key not in ("words", *TIMING)} for row in found]

    assert known(mine) == known(others)
    require_same_course(run, other)


def _disturbed(together: Together, kind: str, options: list[str], size: int = 1) -> list[Ended]:
    given = [_DISTURBS, *kind.split(), str(_NO_NUMBER), *options]
    programs = {f"program_{each}": DISTURBED for each in range(size)}
    return together.run(size, given, **programs)


@pytest.fixture(scope="module")
def troubled(together: Together, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """The run that one process makes with the same trouble."""

    @functools.cache
    def made(*settings: str) -> Path:
        run = tmp_path_factory.mktemp("one") / "run"
        (end,) = _disturbed(together, "sheepop.train.placement OneDevice.clip", together.options(run, *settings))
        assert end.code == 0, end.err
        return run

    return made


_EVERY_DAY = ("1f1b", "skip", "rewind")
_CAMPAIGN = [
    (name, *policies)
    for name in STRATEGIES
    for policies in (("skip", "rewind"), ("rewind", "skip"))
    if (name, *policies) != _EVERY_DAY
]


@pytest.mark.parametrize(
    ("name", "non_finite", "spike"),
    [_EVERY_DAY, *(pytest.param(*each, marks=pytest.mark.campaign) for each in _CAMPAIGN)],
)
def test_all_ranks_meet_the_trouble_of_one_as_one_process_does(
    together: Together, troubled: Callable[..., Path], tmp_path: Path, name: str, non_finite: str, spike: str
) -> None:
    strategy, run = STRATEGIES[name], tmp_path / "run"
    settings = [*_SETTINGS, f"training.trouble.non_finite={non_finite}", f"training.trouble.spike={spike}"]
    one = troubled(*settings, *strategy.needs)
    kind = "sheepop.train.sharded ShardedModel.clip"
    ends = _disturbed(together, kind, together.options(run, *settings, *strategy.options), strategy.ranks)
    assert [end.code for end in ends] == [0] * strategy.ranks, ends
    assert sum("non-finite" in end.err for end in ends) == 1
    _same(one, run)


@pytest.mark.campaign
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_save_what_was_good_and_one_says_why_they_stop(together: Together, tmp_path: Path, name: str) -> None:
    strategy, run = STRATEGIES[name], tmp_path / "run"
    options = together.options(run, *_SETTINGS, "training.trouble.non_finite=stop", *strategy.options)
    ends = _disturbed(together, "sheepop.train.sharded ShardedModel.clip", options, strategy.ranks)
    assert [end.code for end in ends] == [1] * strategy.ranks, ends
    assert sum("Step 6 gave" in end.err for end in ends) == 1, ends
    assert RunDirectory.open(run).pointer("latest") == _NO_NUMBER - 1
