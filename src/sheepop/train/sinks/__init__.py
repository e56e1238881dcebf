"""Where metrics go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow; none can stop a run."""

from sheepop.train.sinks.guard import GuardedSink, Sink, Sinks
from sheepop.train.sinks.services import RunDescription, open_sinks, require_sinks

__all__ = ["GuardedSink", "RunDescription", "Sink", "Sinks", "open_sinks", "require_sinks"]
