"""The settings of what a run looks at while it trains: ``trace``, a prompt, and ``analysis``, its own stability."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


Quantity = Literal["sharpness", "noise", "layers"]


class AnalysisConfig(Config):
    """What a run measures of its own stability while it trains. It changes no weight and no random number."""

    quantities: tuple[Quantity, ...] = ()
    """What is measured: the `sharpness` of the loss against the limit of the optimizer, where along a step the loss
    turns, and where along the last steps it is lowest; the `noise` of the gradient and the batch that it recommends; in
    the `layers`, how fast weights move, the largest scores of attention, and dead heads and units. Empty measures
    nothing."""
    interval: Annotated[int, Field(ge=1)] | None = None
    """Steps between two measurements; `null` means as many as keep their cost below 3 percent of the run, which is
    counted in passes through the network."""
    rows: Annotated[int, Field(ge=2)] | None = None
    """Rows of the step's batch on which sharpness and layers are measured, at most a micro-batch; `null` means a
    quarter of the batch, and at least 8. Fewer rows make the loss look sharper."""

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        if len(set(self.quantities)) < len(self.quantities):
            raise ValueError("quantities names something twice; name each once")
        return self
