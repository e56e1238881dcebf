"""The settings under ``trace``: the prompt that a run traces during training."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from sheepop.core.config import Config


class TraceConfig(Config):
    """A prompt that a run traces at every sample."""

    prompt: str | None = None
    """A text that the run traces at every `training.sample_interval` into its directory `traces/`; `null` traces
    nothing."""
    target: str | None = None
    """For an encoder-decoder, which reads `prompt` as its source: the beginning of the target text; `null` means an
    empty target."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.target is not None and self.prompt is None:
            raise ValueError("target needs a prompt; set trace.prompt, too, or leave trace.target out")
        return self
