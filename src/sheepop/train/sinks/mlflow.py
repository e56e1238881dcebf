"""MLflow: a run of the same name in the experiment ``sheepop``, or in the one that ``MLFLOW_EXPERIMENT_NAME`` names.

The place is MLflow's own choice: ``MLFLOW_TRACKING_URI``, else its default, so that ``mlflow ui`` finds it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from sheepop.train.sinks.interface import RunDescription, numbers

IDENTITY_TAG = "sheepop.run"
_EXPERIMENT = "sheepop"
_LONGEST_VALUE = 500  # characters of a parameter that every version of the server takes


class MLflow:
    """The numbers of every row under ``split/name`` by step; a resumed run goes on with its own curve."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    @classmethod
    def open(cls, run: RunDescription, say: Callable[[str], None]) -> MLflow:
        """Begins the run there, or goes on with the one that carries its identity."""
        # What it tells of its tables would be written across the live view.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        known = client.search_runs([experiment_id], f"tags.`{IDENTITY_TAG}` = '{run.identity}'", max_results=1)
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return cls(client, known[0].info.run_id)
        made = client.create_run(experiment_id, run_name=run.name, tags={IDENTITY_TAG: run.identity})
        sink = cls(client, made.info.run_id)
        sink._log_settings(run)
        return sink

    def _log_settings(self, run: RunDescription) -> None:
        """The configuration as parameters; those that are too long for one are kept as tags, whole."""
        for name, value in run.flat_settings().items():
            if len(value) <= _LONGEST_VALUE:
                self._client.log_param(self._run_id, name, value)
            else:
                self._client.set_tag(self._run_id, f"setting.{name}", value)

    def write(self, row: Mapping[str, Any]) -> None:
        """Logs the row's numbers at its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, row["step"]) for name, value in numbers(row).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self._run_id)
