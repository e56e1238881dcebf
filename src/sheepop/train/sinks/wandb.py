"""Weights & Biases: a run of the same name in the project ``sheepop``, or in the one that ``WANDB_PROJECT`` names.

Where the machine is logged in the rows go to the service; else they are recorded offline, to be sent later by
``wandb sync``. ``WANDB_MODE`` decides otherwise. The files lie in ``wandb/`` of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sheepop.train.sinks.interface import RunDescription, numbers

_PROJECT = "sheepop"
_FINISH_SECONDS = 60.0


class WeightsAndBiases:
    """The numbers of every row under ``split/name`` by step; a resumed run goes on with its own curve."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> WeightsAndBiases:
        """Begins the run there, or goes on with it; asks nothing of whoever sits before the terminal."""
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False):
            mode = "offline"
            say(f"Weights & Biases: not logged in here, so the run is recorded in {run.directory / 'wandb'}.")
        settings = wandb.Settings(
            console="off",  # the terminal is ours
            silent=True,
            disable_git=True,
            finish_timeout=_FINISH_SECONDS,
        )
        return cls(
            wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=run.name,
                id=run.identity,
                resume="allow",
                mode=mode,
                dir=str(run.directory),
                config=dict(run.settings),
                settings=settings,
            )
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the row's numbers at its step; the service ignores steps that it has already."""
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        """Sends what is left and ends the run."""
        self._run.finish()
