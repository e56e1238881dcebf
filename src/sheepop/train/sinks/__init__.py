"""Sinks of metrics besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow; none can stop a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.train.sinks.guard import GuardedSink, Sink, Sinks
    from sheepop.train.sinks.services import RunDescription, open_sinks, require_sinks
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["GuardedSink", "RunDescription", "Sink", "Sinks", "open_sinks", "require_sinks"]
