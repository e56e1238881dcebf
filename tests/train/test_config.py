"""Settings that nothing would read, and combinations that contradict themselves, are refused in words."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from sheepop.core.config import dump_config, parse_config, validate
from sheepop.core.errors import ConfigError
from sheepop.train import TrainingConfig
from sheepop.train.config import OPTIMIZER_NAMES
from sheepop.train.schedule import ScheduleName

SCHEDULE_FREE = {"optimizer": "schedule_free_adamw", "schedule": "constant"}
GIVEN = {"betas": [0.5, 0.6], "eps": 1e-4, "momentum": 0.3}
READ = {
    "adamw": {"betas", "eps"},
    "adam": {"betas", "eps"},
    "sgd": {"momentum"},
    "muon": {"betas", "eps", "momentum"},
    "lion": {"betas"},
    "adafactor": {"eps"},
    "schedule_free_adamw": {"betas", "eps"},
}


def training(**settings: Any) -> TrainingConfig:
    return validate(TrainingConfig, settings)


@pytest.mark.parametrize("key", GIVEN)
@pytest.mark.parametrize("name", list(OPTIMIZER_NAMES))
def test_a_setting_that_the_optimizer_does_not_read_is_refused(name: str, key: str) -> None:
    settings = {"optimizer": name, "schedule": "constant", key: GIVEN[key]}
    if key in READ[name]:
        assert training(**settings).optimizer == name
        return
    with pytest.raises(ConfigError, match=rf"{key} = .* is given, but optimizer = {name} does not read it") as caught:
        training(**settings)
    readers = {other for other, keys in READ.items() if key in keys}
    assert all(other in str(caught.value) for other in readers)


@pytest.mark.parametrize("schedule", sorted({*get_args(ScheduleName)} - {"constant", "piecewise"}))
def test_schedule_free_wants_a_constant_rate(schedule: str) -> None:
    with pytest.raises(ConfigError, match="schedule_free_adamw averages its weights instead of decaying the rate"):
        training(optimizer="schedule_free_adamw", schedule=schedule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": "schedule_free_adamw", "schedule": "constant", "ema_decay": 0.9},
            "already averages its weights",
        ),
        ({"optimizer": "schedule_free_adamw", "schedule": "constant", "betas": [0, 0.9]}, "must be above 0"),
        ({"decay_steps": 5}, "decay_steps = 5 is read only by schedule = wsd, not by cosine"),
        ({"schedule_points": [[0, 1]]}, "schedule_points are read only by schedule = piecewise, not by cosine"),
        ({"schedule": "constant", "min_learning_rate": 1e-5}, "min_learning_rate = 1e-05 is where a decay ends"),
        ({"schedule": "wsd", "max_steps": 10, "warmup_steps": 4, "decay_steps": 7}, "do not fit into 10 steps"),
        ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "Set warmup_steps to at least 1"),
        ({"schedule": "piecewise"}, "needs schedule_points"),
        ({"schedule": "piecewise", "schedule_points": []}, "needs schedule_points"),
        ({"schedule": "piecewise", "schedule_points": [[0, 1], [5, 0.5], [5, 0]]}, r"each step once, not \[0, 5, 5\]"),
        ({"schedule": "piecewise", "schedule_points": [[0, 0], [5, 0]]}, "every factor is 0"),
        ({"schedule": "piecewise", "schedule_points": [[0, 1]], "warmup_steps": 3}, "has its warm-up in"),
        ({"schedule": "piecewise", "schedule_points": [[0, 1]], "min_learning_rate": 1e-5}, "is where a decay ends"),
        ({"schedule": "piecewise", "schedule_points": [[0, -1]]}, r"schedule_points\.0\.1 = -1"),
        ({"schedule": "piecewise", "schedule_points": [[0.5, 1]]}, r"schedule_points\.0\.0 = 0\.5"),
        ({"layers": [{"pattern": ""}]}, r"layers\.0\.pattern"),
        ({"layers": [{"pattern": "a", "learning_rat": 1}]}, r"Did you mean layers\.learning_rate\?"),
        ({"ema_decay": 1.0}, "ema_decay = 1"),
        ({"eps": 1e-40}, "eps = 1e-40"),  # would be rounded in float32, and at last to 0
        ({"max_epochs": 1e300}, "max_epochs = 1e"),
        ({"max_minutes": 1e300}, "max_minutes = 1e"),
        ({"max_steps": 10**400}, "max_steps = 1"),
        ({"max_tokens": 10**400}, "max_tokens = 1"),
        ({"momentum": 1.0, "optimizer": "sgd"}, "momentum = 1"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(**settings)


def test_all_of_it_is_written_and_read_back() -> None:
    config = training(
        schedule="piecewise",
        schedule_points=[[0, 0.1], [10, 1]],
        layers=[{"pattern": "blocks.*", "learning_rate": 0.5}],
        ema_decay=0.99,
        optimizer="sgd",
        momentum=0,
    )
    assert validate(TrainingConfig, parse_config(dump_config(config), where="config")) == config
