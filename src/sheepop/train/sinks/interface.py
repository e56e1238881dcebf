"""What a place that shows a run's metrics is to the loop: it hears every row and is closed at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sheepop.core.config import leaves


class Sink(Protocol):
    """Something that wants every row of metrics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Hears one row."""

    def close(self) -> None:
        """Hears that no more rows come."""


@dataclass(frozen=True)
class RunDescription:
    """What a sink is told about the run before its first row.

    `identity` is the same for the whole life of the run, however often it is resumed; `first_step` is the step that
    it starts or goes on with; `settings` is its configuration.
    """

    directory: Path
    name: str
    identity: str
    first_step: int
    settings: Mapping[str, Any]

    def flat_settings(self) -> dict[str, str]:
        """The configuration without nesting: ``training.seed`` and the like, to the value as JSON."""
        return {
            path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for path, value in leaves(self.settings)
        }


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under ``split/name``, without the step."""
    return {
        f"{row['split']}/{key}": value
        for key, value in row.items()
        if key not in ("step", "split") and isinstance(value, int | float)
    }
