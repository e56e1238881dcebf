"""Processor time of competitors that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Work = Callable[[], object]


def processor_seconds(tasks: Mapping[str, Work], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of processor time for each task, and what it returned last; the tasks alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    results = {}
    for _ in range(rounds):
        for name, work in tasks.items():
            started = time.process_time()
            results[name] = work()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}, results
