"""The coordinate check of a config file and of a run: the usual initialization is told from muP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.interpret.control.coordinates import Coordinates, Growth
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.coordinates import CoordinatesRequest, check_coordinates

from ..running import train

WIDTHS = (16, 32, 64, 128)
Check = Callable[..., Coordinates]


@pytest.fixture(scope="module")
def check(text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Check:
    """``check("key=value")``: four widths of a tiny network trained for three steps at a fixed rate of Adam."""
    file = tmp_path_factory.mktemp("config") / "network.yaml"
    file.write_text("training: {learning_rate: 0.003, weight_decay: 0.0, max_grad_norm: null}\n")
    options = {"data": {"paths": [str(text_folder)]}, "device": "cpu"}

    @cache
    def run(*overrides: str) -> Coordinates:
        given = (*tiny, "model.dropout=0", "model.position_encoding=rope", "model.tie_weights=false", *overrides)
        return check_coordinates(CoordinatesRequest(file, WIDTHS, 3, overrides=given, options=options))

    return run


def growths(found: Coordinates) -> dict[str, Growth]:
    return dict(zip(found.places, found.after, strict=True))


def test_pre_activations_grow_with_the_width_at_one_rate_and_do_not_with_mup(check: Check) -> None:
    usual, mup = check(), check("model.initialization=mup", "model.mup_base_d_model=16")
    place = "blocks.0.feed_forward.pre_activation"
    assert growths(usual)[place].factor > 1.4 and growths(usual)[place].direction == 1
    assert growths(mup)[place].factor == pytest.approx(1.0, rel=0.15)
    assert "This parametrisation is not muP" in " ".join(usual.sentences())
    assert [growth.direction for growth in mup.after] == [0] * len(mup.places), mup.table()
    assert usual.rate == 0.003 and usual.changes.shape == (3, len(usual.places), 4)


def test_the_narrowest_networks_of_both_are_the_same(check: Check) -> None:
    """At its base muP is the ordinary network, so that it trains alike."""
    usual, mup = check(), check("model.initialization=mup", "model.mup_base_d_model=16")
    assert torch.allclose(usual.changes[:, :, 0], mup.changes[:, :, 0])


def test_a_run_is_checked_on_its_own_data(configured: Callable[..., SheepOpConfig], tmp_path: Path) -> None:
    run = train(configured(tmp_path / "run", "training.max_steps=1")).run
    before = sorted(path.name for path in run.rglob("*"))
    request = CoordinatesRequest(run, (16, 32, 64), 1, 0.01, tmp_path / "out", options={"device": "cpu"})
    found = check_coordinates(request)
    assert found.rate == 0.01 and found.widths == (16, 32, 64)
    assert (tmp_path / "out" / "coordinates.json").is_file() and (tmp_path / "out" / "coordinates.svg").is_file()
    assert sorted(path.name for path in run.rglob("*")) == before
    with pytest.raises(UsageError, match="nothing would change"):
        check_coordinates(CoordinatesRequest(run, learning_rate=0.0))
    with pytest.raises(UsageError, match="is a run, which has its settings and data"):
        check_coordinates(CoordinatesRequest(run, overrides=("seed=1",)))


def test_what_has_no_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run directory nor a config file"):
        check_coordinates(CoordinatesRequest(tmp_path / "nothing"))
