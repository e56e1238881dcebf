"""The settings under ``trace``: what a run looks into while it trains."""

from __future__ import annotations

from sheepop.core.config import Config


class TraceConfig(Config):
    """A prompt that is traced whenever a run lets its model write."""

    prompt: str | None = None
    """A text that is followed through the network at every `training.sample_interval`, into `traces/` of the run;
    `null` traces nothing."""
