"""Runs as tests start them: from a whole configuration, to which no recipe adds anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run import train as job
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import TrainOutcome

from . import pictures  # noqa: F401


def train(config: SheepOpConfig, **request: Any) -> TrainOutcome:
    """The outcome of a run with these settings; `request` are other fields of `RunRequest`."""
    request = {name: value for name, value in request.items() if value is not None}
    return job.train(RunRequest.exactly(config, **request))


def train_given(overrides: Sequence[str], **request: Any) -> TrainOutcome:
    """The outcome of a run for which only these ``key=value`` settings are given."""
    return job.train(RunRequest.of({}, overrides=overrides, uses_recipe=False, **request))
