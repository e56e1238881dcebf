"""The settings under ``trace``: what a run looks into while it trains."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from sheepop.core.config import Config


class TraceConfig(Config):
    """A prompt that is traced whenever a run lets its model write."""

    prompt: str | None = None
    """A text that is followed through the network at every `training.sample_interval`, into `traces/` of the run;
    `null` traces nothing."""
    target: str | None = None
    """What an encoder-decoder is taken to have written when it has read `prompt` as its source; `null` is nothing."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.target is not None and self.prompt is None:
            raise ValueError("target stands behind a prompt; set trace.prompt, too, or leave trace.target out")
        return self
